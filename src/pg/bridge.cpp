// See bridge.hpp.
#include "pg/bridge.hpp"

#include <algorithm>

#include "pg/guard.hpp"

namespace outbox::pg {

namespace {

using core::Micros;

// Rows of one lane read by one claim, at most.
constexpr std::size_t kMaxRead = 10'000;

std::string_view view(FlatText text) noexcept {
    return {text.data, text.size};
}

core::Uuid uuid_of(const FlatRow& row) noexcept {
    core::Uuid id;
    std::copy(std::begin(row.id), std::end(row.id), id.bytes.begin());
    return id;
}

std::optional<core::Target> target_of(const FlatConfig& flat) {
    std::string error;
    std::optional<core::Endpoint> endpoint = core::Endpoint::parse(flat.endpoint, error);
    if (!endpoint) {
        return std::nullopt;
    }
    core::Target target{std::move(*endpoint), {}, flat.source};
    for (std::size_t i = 0; i < flat.headers; ++i) {
        target.fixed_headers.push_back({flat.header_names[i], flat.header_values[i]});
    }
    return target;
}

// What no answer may bring back into last_error or the log: header values, whole and their last
// word (a token after its scheme), and what the URL holds.
std::vector<std::string> secrets_of(const core::Target& target) {
    constexpr std::size_t kShortest = 4;
    std::vector<std::string> secrets = target.endpoint.secrets();
    for (const core::Header& header : target.fixed_headers) {
        for (const std::size_t from : {std::size_t{0}, header.value.rfind(' ') + 1}) {
            if (header.value.size() >= from + kShortest) {
                secrets.push_back(header.value.substr(from));
            }
        }
    }
    return secrets;
}

net::DeliveryConfig config_of(const FlatConfig& flat) {
    net::DeliveryConfig config;
    config.engine.connect_timeout = flat.connect_timeout;
    config.engine.request_timeout = flat.request_timeout;
    config.engine.ca_file = flat.ca_file;
    config.engine.max_connections = flat.max_in_flight;
    config.dispatch.max_in_flight = flat.max_in_flight;
    config.dispatch.max_bytes = flat.max_bytes;
    config.dispatch.max_rows = 2 * flat.batch_size;
    config.dispatch.ordering = flat.ordering;
    config.retry = flat.retry;
    config.max_attempts = flat.max_attempts;
    config.format = core::find_format(flat.format);
    config.target = target_of(flat);
    if (config.target) {
        config.secrets = secrets_of(*config.target);
    }
    return config;
}

} // namespace

Bridge* Bridge::create(const FlatConfig& config, std::uint32_t seed) noexcept {
    Bridge* made = nullptr;
    std::string error;
    const bool ran = guarded([&] {
        std::unique_ptr<Bridge> bridge(new Bridge);
        bridge->delivery_ = net::Delivery::create(config_of(config), seed, error);
        if (bridge->delivery_ != nullptr) {
            made = bridge.release();
        }
    });
    if (ran && made == nullptr) {
        std::strncpy(guard_text(), error.c_str(), 255);
    }
    return made;
}

bool Bridge::configure(const FlatConfig& config) noexcept {
    return run([&] { delivery_->configure(config_of(config)); });
}

bool Bridge::step(Micros steady) noexcept {
    return run([&] { delivery_->step(steady); });
}

bool Bridge::start(Micros steady) noexcept {
    return run([&] { delivery_->start(steady); });
}

// --- what to read ---

bool Bridge::announced(std::uint32_t tag, std::int64_t lo, std::int64_t hi) noexcept {
    bool known = false;
    return run([&] { known = delivery_->scan().announced(tag, lo, hi); }) && known;
}

bool Bridge::rescan() noexcept {
    return run([&] { delivery_->scan().rescan(); });
}

bool Bridge::discovered(FlatText lane) noexcept {
    return run([&] { delivery_->scan().discovered(view(lane)); });
}

bool Bridge::waits_until(FlatText lane, Micros at) noexcept {
    return run([&] { delivery_->scan().waits_until(view(lane), at); });
}

std::size_t Bridge::plan_ready(std::size_t factor) noexcept {
    reads_.clear();
    (void)run([&] {
        for (std::string& lane : delivery_->scan().lanes_wanted()) {
            const std::size_t room = delivery_->dispatcher().row_room(lane);
            const auto range = delivery_->scan().wanted(lane);
            if (room > 0 && range) {
                reads_.push_back({std::move(lane), *range, std::min(room * factor, kMaxRead)});
            }
        }
    });
    return reads_.size();
}

std::size_t Bridge::plan_due(Micros now, std::size_t factor) noexcept {
    reads_.clear();
    (void)run([&] {
        for (std::string& lane : delivery_->scan().lanes_due(now)) {
            // Due rows in memory are still due in the table: read past them.
            const std::size_t room = delivery_->dispatcher().row_room(lane);
            const std::size_t held = delivery_->dispatcher().held_events();
            if (room > 0) {
                reads_.push_back({std::move(lane), {}, std::min(room * factor + held, kMaxRead)});
            }
        }
    });
    return reads_.size();
}

void Bridge::ready_read_to(std::size_t index, std::int64_t seq) noexcept {
    (void)guarded([&] { delivery_->scan().read_to(reads_[index].lane, reads_[index].range, seq); });
}

void Bridge::ready_read_whole(std::size_t index, bool has_last, std::int64_t last) noexcept {
    (void)run([&] {
        delivery_->scan().read_whole(reads_[index].lane, reads_[index].range,
                                     has_last ? std::optional{last} : std::nullopt);
    });
}

void Bridge::due_read(std::size_t index, bool has_next, Micros next) noexcept {
    (void)run([&] {
        delivery_->scan().due_read(reads_[index].lane,
                                   has_next ? std::optional{next} : std::nullopt);
    });
}

bool Bridge::unread_after(std::string_view lane, std::int64_t* seq) const noexcept {
    std::optional<core::SeqRange> wanted;
    (void)run([&] { wanted = delivery_->scan().wanted(lane); });
    *seq = wanted ? wanted->after : core::kAfterAll;
    return wanted.has_value();
}

bool Bridge::wants_ready() const noexcept {
    const core::Dispatcher& dispatcher = delivery_->dispatcher();
    return delivery_->scan().any_wanted(
        [&](std::string_view lane) { return dispatcher.row_room(lane) > 0; });
}

bool Bridge::wants_due(Micros now) const noexcept {
    const core::Dispatcher& dispatcher = delivery_->dispatcher();
    return delivery_->scan().any_due(
        now, [&](std::string_view lane) { return dispatcher.row_room(lane) > 0; });
}

bool Bridge::next_due(Micros* at) const noexcept {
    const std::optional<Micros> next = delivery_->scan().next_due();
    *at = next.value_or(0);
    return next.has_value();
}

// --- rows ---

core::Admission Bridge::examine(const FlatRow& row, core::Source source) noexcept {
    core::Admission admission = core::Admission::full;
    (void)run([&] {
        admission = delivery_->dispatcher().examine(
            uuid_of(row), view(row.aggregate_type), view(row.aggregate_id), source,
            row.has_earlier ? std::optional{row.earlier} : std::nullopt);
    });
    return admission;
}

bool Bridge::byte_room(FlatText lane, std::size_t bytes) noexcept {
    bool room = false;
    (void)run([&] { room = delivery_->dispatcher().byte_room(view(lane), bytes); });
    return room;
}

bool Bridge::begin(const FlatRow& row) noexcept {
    return run([&] {
        event_ = core::Event{};
        event_.id = uuid_of(row);
        event_.seq = row.seq;
        event_.aggregate_type = view(row.aggregate_type);
        event_.aggregate_id = view(row.aggregate_id);
        event_.event_type = view(row.event_type);
        event_.attempts = row.attempts;
        event_.row = row.row;
        if (row.has_created_at) {
            event_.created_at = row.created_at;
        }
    });
}

bool Bridge::add_header(FlatText name, FlatText value) noexcept {
    return run([&] {
        event_.headers.push_back({std::string{view(name)}, std::string{view(value)}});
    });
}

bool Bridge::headers_invalid(const char* why) noexcept {
    return run([&] { event_.headers_error = why; });
}

bool Bridge::unreadable(const char* why) noexcept {
    return run([&] { event_.unreadable = why; });
}

bool Bridge::admit(FlatText payload, core::Source source) noexcept {
    return run([&] {
        event_.payload = view(payload);
        delivery_->dispatcher().admit(std::move(event_), source);
    });
}

bool Bridge::parked(const FlatRow& row) noexcept {
    return run([&] {
        delivery_->dispatcher().parked(view(row.aggregate_type), view(row.aggregate_id));
        parking_.push_back(
            {row.row, std::string{view(row.aggregate_type)}, std::string{view(row.aggregate_id)}});
    });
}

bool Bridge::hold(FlatText type, FlatText id) noexcept {
    return run([&] { delivery_->dispatcher().hold(view(type), view(id)); });
}

bool Bridge::release_holds() noexcept {
    return run([&] { delivery_->dispatcher().release_holds(); });
}

bool Bridge::orphaned(FlatText type, FlatText id) noexcept {
    return run([&] { delivery_->dispatcher().orphaned(view(type), view(id)); });
}

// --- followers and parking ---

std::size_t Bridge::take_followers_wanted(std::size_t most) noexcept {
    followers_.clear();
    (void)run([&] { followers_ = delivery_->dispatcher().take_followers_wanted(most); });
    return followers_.size();
}

void Bridge::followers_read_all(std::size_t index) noexcept {
    (void)run([&] { delivery_->dispatcher().followers_read_all(followers_[index]); });
}

void Bridge::followers_read_some(std::size_t index) noexcept {
    (void)run([&] { delivery_->dispatcher().followers_read_some(followers_[index]); });
}

void Bridge::followers_not_read(std::size_t index) noexcept {
    (void)run([&] { delivery_->dispatcher().followers_not_read(followers_[index]); });
}

void Bridge::abandon_followers() noexcept {
    (void)run([&] {
        for (const auto& name : followers_) {
            delivery_->dispatcher().followers_not_read(name);
        }
        followers_.clear();
    });
}

bool Bridge::wants_followers() const noexcept {
    return delivery_->dispatcher().wants_followers();
}

std::size_t Bridge::take_parking() noexcept {
    (void)run([&] {
        for (auto& parking : delivery_->dispatcher().take_parking()) {
            parking_.push_back(std::move(parking));
        }
    });
    return parking_.size();
}

bool Bridge::wants_parking() const noexcept {
    return !parking_.empty() || delivery_->dispatcher().wants_parking();
}

// --- results ---

bool Bridge::next_deferred(Micros* at) const noexcept {
    const std::optional<Micros> next = delivery_->next_deferred();
    *at = next.value_or(0);
    return next.has_value();
}

std::size_t Bridge::take_batch(std::size_t most, Micros steady) noexcept {
    std::size_t size = 0;
    (void)run([&] { size = delivery_->take_batch(most, steady); });
    return size;
}

void Bridge::settle(std::size_t index, core::Settled how) noexcept {
    (void)run([&] {
        delivery_->settle(index, how);
        for (const auto& reread : delivery_->dispatcher().take_rereads()) {
            delivery_->scan().again(reread.lane, reread.range);
            delivery_->scan().waits_until(reread.lane, std::numeric_limits<Micros>::min());
        }
    });
}

void Bridge::defer(std::size_t index, Micros steady) noexcept {
    (void)run([&] { delivery_->defer(index, steady); });
}

// --- buckets ---

bool Bridge::set_buckets(core::BucketMask mine) noexcept {
    return run([&] { delivery_->dispatcher().set_buckets(mine); });
}

core::BucketMask Bridge::buckets() const noexcept {
    return delivery_->dispatcher().buckets();
}

core::BucketMask Bridge::busy_buckets() const noexcept {
    return delivery_->dispatcher().busy_buckets();
}

} // namespace outbox::pg
