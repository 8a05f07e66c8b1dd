// See delivery.hpp.
#include "net/delivery.hpp"

#include <algorithm>
#include <utility>

#include "core/verdict.hpp"

namespace outbox::net {

using core::Event;
using core::Micros;
using core::Outcome;
using core::Verdict;

std::unique_ptr<Delivery> Delivery::create(const DeliveryConfig& config, std::uint32_t seed,
                                           std::string& error) {
    auto engine = HttpEngine::create(config.engine, error);
    if (engine == nullptr) {
        return nullptr;
    }
    return std::unique_ptr<Delivery>(new Delivery(config, seed, std::move(engine)));
}

Delivery::Delivery(const DeliveryConfig& config, std::uint32_t seed,
                   std::unique_ptr<HttpEngine> engine)
    : config_(config), random_(seed), dispatcher_(config.dispatch), engine_(std::move(engine)) {}

void Delivery::configure(const DeliveryConfig& config) {
    config_ = config;
    dispatcher_.set_limits(config.dispatch);
    engine_->set_options(config.engine);
}

double Delivery::jitter() {
    return std::uniform_real_distribution<double>{0.0, 1.0}(random_);
}

void Delivery::start(Micros now) {
    if (!config_.target) {
        return;
    }
    const std::size_t running = engine_->running();
    while (const Event* event = dispatcher_.next()) {
        start_one(*event, now);
    }
    if (engine_->running() > running) {
        engine_->step(); // the requests leave now, not after the caller's next wait
    }
}

void Delivery::start_one(const Event& event, Micros now) {
    if (!event.unreadable.empty()) {
        Verdict verdict;
        verdict.outcome = Outcome::event_failure;
        verdict.error = core::printable(event.unreadable, core::kMaxErrorBytes);
        conclude(event, verdict, 0, now);
        return;
    }
    if (event.attempts >= config_.max_attempts) {
        Result result = result_of(event);
        result.kind = ResultKind::dead;
        result.error =
            "not sent: attempts had reached the limit of " + std::to_string(config_.max_attempts);
        dispatcher_.answered(event.id);
        results_.push_back(std::move(result));
        return;
    }
    const Event* events[] = {&event};
    core::BuildResult built = config_.format->build(events, *config_.target);
    if (!built.ok) {
        conclude(event, core::unbuildable(built.error), 0, now);
        return;
    }
    sent_.emplace(event.id, &event);
    dispatcher_.release_payload(event.id);
    engine_->submit(event.id, std::move(built.request));
}

void Delivery::step(Micros now) {
    engine_->step();
    for (Finished& finished : engine_->take_finished()) {
        const auto node = sent_.extract(finished.id);
        if (node.empty()) {
            continue;
        }
        const Event& event = *node.mapped();
        core::redact(finished.answer.body, config_.secrets);
        core::redact(finished.answer.error, config_.secrets);
        conclude(event, config_.format->classify(finished.answer, 1).front(),
                 finished.answer.status, now);
    }
}

namespace {

// Counted failures with this one; attempts is a user's column: -1 and the largest int are possible.
std::int32_t failures_of(const Event& event) {
    constexpr std::int32_t kMost = std::numeric_limits<std::int32_t>::max();
    return std::min(std::max(event.attempts, 0), kMost - 1) + 1;
}

} // namespace

Result Delivery::result_of(const Event& event) const {
    Result result;
    result.id = event.id;
    result.seq = event.seq;
    result.aggregate_type = event.aggregate_type;
    result.aggregate_id = event.aggregate_id;
    result.event_type = event.event_type;
    result.row = event.row;
    result.replay = event.replay;
    result.unreadable = !event.unreadable.empty();
    result.attempts_before = event.attempts;
    result.attempts = event.attempts;
    result.created_at = event.created_at;
    return result;
}

void Delivery::failed(Result& result, std::int32_t failures, Micros delay) const {
    result.attempts = failures;
    result.kind = failures >= config_.max_attempts ? ResultKind::dead : ResultKind::retry;
    result.delay = delay;
}

void Delivery::conclude(const Event& event, const Verdict& verdict, int status, Micros now) {
    Result result = result_of(event);
    result.status = status;
    result.error = verdict.error;
    switch (verdict.outcome) {
    case Outcome::delivered:
        lanes_.succeeded(event.aggregate_type);
        failures_in_a_row_ = 0;
        break;
    case Outcome::lane_failure:
        result.kind = ResultKind::retry;
        result.delay = lanes_.failed(event.aggregate_type, now, jitter());
        result.delay = verdict.retry_after.value_or(result.delay);
        ++failures_in_a_row_;
        break;
    case Outcome::event_failure:
        failed(result, failures_of(event),
               core::back_off(config_.retry, failures_of(event), jitter()));
        result.delay = verdict.retry_after.value_or(result.delay);
        failures_in_a_row_ += result.unreadable ? 0 : 1;
        break;
    case Outcome::unbuildable:
        result.kind = ResultKind::dead;
        break;
    case Outcome::aborted:
        dispatcher_.settled(event.id, core::Settled::changed);
        return;
    }
    dispatcher_.answered(event.id);
    results_.push_back(std::move(result));
}

// --- recording ---

bool Delivery::has_results(Micros now) const noexcept {
    return !results_.empty() || (!deferred_.empty() && deferred_.begin()->first <= now);
}

std::optional<Micros> Delivery::next_deferred() const noexcept {
    return deferred_.empty() ? std::nullopt : std::optional<Micros>{deferred_.begin()->first};
}

std::size_t Delivery::unrecorded() const noexcept {
    return results_.size() + deferred_.size() + batch_.size();
}

std::size_t Delivery::take_batch(std::size_t most, Micros now) {
    while (batch_.size() < most && !deferred_.empty() && deferred_.begin()->first <= now) {
        batch_.push_back(std::move(deferred_.extract(deferred_.begin()).mapped()));
    }
    while (batch_.size() < most && !results_.empty()) {
        batch_.push_back(std::move(results_.front()));
        results_.pop_front();
    }
    return batch_.size();
}

void Delivery::settle(std::size_t index, core::Settled how) {
    dispatcher_.settled(batch_[index].id, how);
}

void Delivery::defer(std::size_t index, Micros at) {
    deferred_.emplace(at, std::move(batch_[index]));
}

} // namespace outbox::net
