// Brings claimed events to their endpoint: the dispatcher says which may go, the format builds the
// request, the engine sends it, the answer becomes a result to record. Knows no table: rows come in
// through admit(), results go out through take_batch() and come back as recorded or deferred. One
// thread.
#pragma once

#include <deque>
#include <map>
#include <random>

#include "core/dispatch.hpp"
#include "core/format.hpp"
#include "core/lane_back_off.hpp"
#include "core/retry.hpp"
#include "net/http_engine.hpp"

namespace outbox::net {

struct DeliveryConfig {
    EngineOptions engine;
    core::DispatchLimits dispatch;
    std::vector<std::string> secrets; // never repeated from an answer
    core::RetryPolicy retry;
    std::int32_t max_attempts = 10;
    const core::Format* format = nullptr;
    std::optional<core::Target> target; // none: nothing is sent
};

// What is to be recorded of an event.
enum class ResultKind : std::uint8_t { delivered, retry, dead };

struct Result {
    core::Uuid id;
    std::int64_t seq = 0;
    std::string aggregate_type;
    std::string aggregate_id;
    std::string event_type;
    core::RowVersion row;
    bool replay = false;
    bool unreadable = false; // the row could not be read
    std::int32_t attempts_before = 0;
    std::optional<core::Micros> created_at; // Unix time

    ResultKind kind = ResultKind::delivered;
    std::int32_t attempts = 0;  // to record
    core::Micros delay = 0;     // of a retry, from when it is recorded
    std::string error;          // for last_error; empty if delivered
    int status = 0;             // HTTP status; 0: none came
    std::int32_t deferrals = 0; // how often recording it failed
};

class Delivery {
  public:
    // Null, and `error` set, when the engine cannot start. `seed` feeds the jitter.
    [[nodiscard]] static std::unique_ptr<Delivery> create(const DeliveryConfig& config,
                                                          std::uint32_t seed, std::string& error);

    // In force for requests started from now on.
    void configure(const DeliveryConfig& config);
    [[nodiscard]] bool has_target() const noexcept { return config_.target.has_value(); }

    [[nodiscard]] core::Dispatcher& dispatcher() noexcept { return dispatcher_; }
    [[nodiscard]] core::Scan& scan() noexcept { return scan_; }

    [[nodiscard]] int wait_fd() const noexcept { return engine_->wait_fd(); }
    [[nodiscard]] long timeout_ms() const noexcept { return engine_->timeout_ms(); }

    // Sends what may be sent.
    void start(core::Micros now);
    // Moves requests on; their answers become results. `now` is the caller's steady clock.
    void step(core::Micros now);
    [[nodiscard]] std::size_t in_flight() const noexcept { return engine_->running(); }

    // --- recording ---
    [[nodiscard]] bool has_results(core::Micros now) const noexcept;
    [[nodiscard]] std::optional<core::Micros> next_deferred() const noexcept;
    [[nodiscard]] std::size_t unrecorded() const noexcept;
    // Moves up to `most` results into the batch and returns its size; the batch stays until
    // batch_done().
    std::size_t take_batch(std::size_t most, core::Micros now);
    [[nodiscard]] Result& batch(std::size_t index) noexcept { return batch_[index]; }
    // Result `index` is recorded, or there is nothing to record any more.
    void settle(std::size_t index, core::Settled how);
    // It cannot be recorded now; it comes again at `at`.
    void defer(std::size_t index, core::Micros at);
    // Forgets the batch; each result was settled or deferred.
    void batch_done() noexcept { batch_.clear(); }

    // Answers in a row without a success among them, over all lanes.
    [[nodiscard]] std::uint32_t failures_in_a_row() const noexcept { return failures_in_a_row_; }

  private:
    Delivery(const DeliveryConfig& config, std::uint32_t seed, std::unique_ptr<HttpEngine> engine);
    [[nodiscard]] double jitter();
    void start_one(const core::Event& event, core::Micros now);
    void conclude(const core::Event& event, const core::Verdict& verdict, int status,
                  core::Micros now);
    [[nodiscard]] Result result_of(const core::Event& event) const;
    void failed(Result& result, std::int32_t failures, core::Micros delay) const;

    DeliveryConfig config_;
    std::minstd_rand random_;
    core::Dispatcher dispatcher_;
    core::Scan scan_;
    core::LaneBackOff lanes_;
    std::unique_ptr<HttpEngine> engine_;
    std::unordered_map<core::Uuid, const core::Event*, core::UuidHash> sent_;
    std::deque<Result> results_;
    std::multimap<core::Micros, Result> deferred_;
    std::vector<Result> batch_;
    std::uint32_t failures_in_a_row_ = 0;
};

} // namespace outbox::net
