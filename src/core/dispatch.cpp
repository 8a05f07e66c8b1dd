// See dispatch.hpp.
#include "core/dispatch.hpp"

#include <algorithm>
#include <utility>

namespace outbox::core {

std::string Dispatcher::key_of(std::string_view type, std::string_view id) {
    std::string key;
    key.reserve(type.size() + 1 + id.size());
    key.append(type).push_back('\0');
    key.append(id);
    return key;
}

Dispatcher::Aggregate* Dispatcher::find_aggregate(std::string_view type,
                                                  std::string_view id) const {
    const auto it = aggregates_.find(key_of(type, id));
    return it == aggregates_.end() ? nullptr : it->second.get();
}

const Dispatcher::Lane* Dispatcher::find_lane(std::string_view name) const noexcept {
    const auto it = lanes_.find(name);
    return it == lanes_.end() ? nullptr : it->second.get();
}

Dispatcher::Aggregate& Dispatcher::aggregate_of(std::string_view type, std::string_view id) {
    std::string key = key_of(type, id);
    if (const auto it = aggregates_.find(key); it != aggregates_.end()) {
        return *it->second;
    }
    auto lane = lanes_.find(type);
    if (lane == lanes_.end()) {
        lane = lanes_.emplace(std::string{type}, std::make_unique<Lane>()).first;
        lane->second->name = type;
    }
    auto aggregate = std::make_unique<Aggregate>();
    aggregate->lane = lane->second.get();
    aggregate->id = id;
    aggregate->bucket = bucket_of(type, id);
    ++aggregate->lane->aggregates;
    return *aggregates_.emplace(std::move(key), std::move(aggregate)).first->second;
}

// --- room ---

std::size_t Dispatcher::row_room(std::string_view name) const noexcept {
    if (draining_) {
        return name == large_lane_ ? 1 : 0;
    }
    const std::size_t held = items_.size() - in_flight_;
    if (held >= limits_.max_rows) {
        return 0;
    }
    const std::size_t free = limits_.max_rows - held;
    const Lane* lane = find_lane(name);
    const std::size_t mine = lane == nullptr ? 0 : lane->events - lane->in_flight;
    return mine >= free ? 0 : (free - mine + 1) / 2;
}

bool Dispatcher::byte_room(std::string_view name, std::size_t bytes) {
    if (large_waits_ && name == large_lane_ && bytes < large_bytes_) {
        return false;
    }
    const std::size_t free = limits_.max_bytes - std::min(bytes_, limits_.max_bytes);
    const Lane* lane = find_lane(name);
    const std::size_t mine = lane == nullptr ? 0 : lane->bytes;
    if (mine + bytes <= free || items_.empty()) {
        large_waits_ = large_waits_ && name != large_lane_;
        draining_ = draining_ && large_waits_;
        return true;
    }
    if (mine == 0 || bytes > limits_.max_bytes / 2) {
        large_waits_ = true;
        draining_ = mine == 0;
        large_lane_ = name;
        large_bytes_ = bytes;
        large_refused_ = true;
    }
    return false;
}

void Dispatcher::claim_ended() noexcept {
    large_waits_ = large_waits_ && large_refused_;
    draining_ = draining_ && large_waits_;
    large_refused_ = false;
}

// --- feeding ---

Admission Dispatcher::examine(const Uuid& id, std::string_view type, std::string_view aggregate_id,
                              Source source, std::optional<std::int64_t> earlier) {
    if ((mine_ & bucket_bit(bucket_of(type, aggregate_id))) == 0) {
        return Admission::foreign;
    }
    if (items_.contains(id)) {
        return Admission::known;
    }
    const Aggregate* aggregate = find_aggregate(type, aggregate_id);
    if (aggregate != nullptr && aggregate->held) {
        return Admission::held;
    }
    if (limits_.ordering == Ordering::aggregate) {
        const std::size_t here =
            aggregate == nullptr ? 0 : aggregate->queue.size() + aggregate->active.size();
        if (source == Source::parked) {
            if (here >= kMaxFollowers) {
                return Admission::full;
            }
        } else {
            // One that stays listed without events knows nothing any more.
            const bool waits =
                aggregate != nullptr && aggregate->waiting && (here > 0 || aggregate->wanted);
            if (here >= kMaxFollowers || waits) {
                return Admission::park;
            }
            if (earlier && (aggregate == nullptr || !holds_seq(*aggregate, *earlier))) {
                return Admission::park;
            }
        }
    }
    return row_room(type) == 0 ? Admission::full : Admission::queued;
}

bool Dispatcher::holds_seq(const Aggregate& aggregate, std::int64_t seq) noexcept {
    return std::ranges::find(aggregate.active, seq) != aggregate.active.end() ||
           std::ranges::any_of(aggregate.queue,
                               [seq](const Item* item) { return item->event.seq == seq; });
}

void Dispatcher::admit(Event&& event, Source source) {
    Aggregate& aggregate = aggregate_of(event.aggregate_type, event.aggregate_id);
    auto item = std::make_unique<Item>();
    item->bytes = event.payload.size();
    item->event = std::move(event);
    item->aggregate = &aggregate;
    const auto place =
        std::ranges::upper_bound(aggregate.queue, item->event.seq, std::ranges::less{},
                                 [](const Item* other) { return other->event.seq; });
    aggregate.queue.insert(place, item.get());
    // A row that waited may have others waiting behind it.
    item->waited = source != Source::ready;
    aggregate.waiting = aggregate.waiting || item->waited;
    aggregate.lane->bytes += item->bytes;
    bytes_ += item->bytes;
    ++aggregate.lane->events;
    ++queued_;
    const Uuid id = item->event.id;
    items_.emplace(id, std::move(item));
    enlist(aggregate);
}

void Dispatcher::parked(std::string_view type, std::string_view id) {
    if (Aggregate* aggregate = find_aggregate(type, id); aggregate != nullptr) {
        aggregate->waiting = true;
    }
}

void Dispatcher::orphaned(std::string_view type, std::string_view id) {
    if ((mine_ & bucket_bit(bucket_of(type, id))) == 0) {
        return;
    }
    Aggregate& aggregate = aggregate_of(type, id);
    aggregate.waiting = true;
    want_followers(aggregate);
}

void Dispatcher::hold(std::string_view type, std::string_view id) {
    Aggregate& aggregate = aggregate_of(type, id);
    drop_queue(aggregate);
    if (!aggregate.held) {
        aggregate.held = true;
        ++holds_;
    }
}

void Dispatcher::release_holds() {
    if (holds_ == 0) {
        return;
    }
    holds_ = 0;
    std::vector<Aggregate*> released;
    for (const auto& [key, aggregate] : aggregates_) {
        if (aggregate->held) {
            aggregate->held = false;
            released.push_back(aggregate.get());
        }
    }
    for (Aggregate* aggregate : released) {
        forget_if_empty(*aggregate);
    }
}

// --- starting ---

bool Dispatcher::may_start(const Aggregate& aggregate) const noexcept {
    return !aggregate.queue.empty() && !aggregate.held &&
           (limits_.ordering == Ordering::none || aggregate.active.empty());
}

void Dispatcher::enlist(Aggregate& aggregate) {
    if (aggregate.runnable || !may_start(aggregate)) {
        return;
    }
    aggregate.runnable = true;
    aggregate.lane->runnable.push_back(&aggregate);
    if (!aggregate.lane->runnable_listed) {
        aggregate.lane->runnable_listed = true;
        runnable_.push_back(aggregate.lane);
    }
}

const Event* Dispatcher::next() {
    if (in_flight_ >= limits_.max_in_flight) {
        return nullptr;
    }
    const std::size_t free = limits_.max_in_flight - in_flight_;
    for (std::size_t turns = runnable_.size(); turns > 0; --turns) {
        Lane* lane = runnable_.front();
        runnable_.pop_front(); // it stays listed while it is looked at, so that nobody forgets it
        const Event* event = lane->in_flight < free ? start_one(*lane) : nullptr;
        if (!lane->runnable.empty()) {
            runnable_.push_back(lane);
        } else {
            lane->runnable_listed = false;
            forget_if_empty(*lane);
        }
        if (event != nullptr) {
            return event;
        }
    }
    return nullptr;
}

const Event* Dispatcher::start_one(Lane& lane) {
    while (!lane.runnable.empty()) {
        Aggregate& aggregate = *lane.runnable.front();
        lane.runnable.pop_front();
        aggregate.runnable = false;
        if (!may_start(aggregate)) {
            forget_if_empty(aggregate);
            continue;
        }
        Item* item = aggregate.queue.front();
        aggregate.queue.pop_front();
        aggregate.active.push_back(item->event.seq);
        item->stage = Stage::in_flight;
        --queued_;
        ++in_flight_;
        ++lane.in_flight;
        ++active_in_bucket_[aggregate.bucket];
        enlist(aggregate);
        return &item->event;
    }
    return nullptr;
}

void Dispatcher::release_payload(const Uuid& id) noexcept {
    if (const auto it = items_.find(id); it != items_.end()) {
        std::string{}.swap(it->second->event.payload);
    }
}

// --- finishing ---

void Dispatcher::answered(const Uuid& id) {
    const auto it = items_.find(id);
    if (it == items_.end() || it->second->stage != Stage::in_flight) {
        return;
    }
    it->second->stage = Stage::settling;
    --in_flight_;
    --it->second->aggregate->lane->in_flight;
}

void Dispatcher::settled(const Uuid& id, Settled how) {
    const auto it = items_.find(id);
    if (it == items_.end() || it->second->stage == Stage::queued) {
        return;
    }
    answered(id);
    Item& item = *it->second;
    Aggregate& aggregate = *item.aggregate;
    aggregate.active.erase(std::ranges::find(aggregate.active, item.event.seq));
    --active_in_bucket_[aggregate.bucket];
    const std::int64_t seq = item.event.seq;
    forget(id);
    const bool ordered = limits_.ordering == Ordering::aggregate;
    if (how == Settled::waiting && ordered) {
        park_queue(aggregate, seq);
    } else if (how == Settled::changed) {
        rereads_.push_back({aggregate.lane->name, {before(seq), ordered ? kAfterAll : seq}});
        if (ordered) {
            drop_queue(aggregate);
        }
    }
    if (!aggregate.queue.empty()) {
        enlist(aggregate);
    } else if (how == Settled::closed && aggregate.waiting && aggregate.active.empty()) {
        want_followers(aggregate);
    } else {
        forget_if_empty(aggregate);
    }
}

void Dispatcher::drop_last(Aggregate& aggregate) {
    const Uuid id = aggregate.queue.back()->event.id;
    aggregate.waiting = aggregate.waiting || aggregate.queue.back()->waited;
    aggregate.queue.pop_back();
    --queued_;
    forget(id);
}

void Dispatcher::drop_queue(Aggregate& aggregate) {
    while (!aggregate.queue.empty()) {
        drop_last(aggregate);
    }
}

void Dispatcher::park_queue(Aggregate& aggregate, std::int64_t head) {
    while (!aggregate.queue.empty() && aggregate.queue.back()->event.seq > head) {
        const Event& event = aggregate.queue.back()->event;
        parking_.push_back({event.row, event.aggregate_type, event.aggregate_id});
        drop_last(aggregate);
    }
}

// Takes an item, no longer in its aggregate's queue, out of all counts.
void Dispatcher::forget(const Uuid& id) {
    const auto it = items_.find(id);
    Lane& lane = *it->second->aggregate->lane;
    lane.bytes -= it->second->bytes;
    bytes_ -= it->second->bytes;
    --lane.events;
    items_.erase(it);
}

void Dispatcher::forget_if_empty(Aggregate& aggregate) {
    if (!aggregate.queue.empty() || !aggregate.active.empty() || aggregate.held ||
        aggregate.runnable || aggregate.wanted) {
        return;
    }
    Lane& lane = *aggregate.lane;
    --lane.aggregates;
    aggregates_.erase(key_of(lane.name, aggregate.id));
    forget_if_empty(lane);
}

void Dispatcher::forget_if_empty(Lane& lane) {
    if (lane.aggregates == 0 && !lane.runnable_listed) {
        lanes_.erase(lanes_.find(lane.name));
    }
}

std::vector<Dispatcher::Parking> Dispatcher::take_parking() noexcept {
    return std::exchange(parking_, {});
}

std::vector<Dispatcher::Reread> Dispatcher::take_rereads() noexcept {
    return std::exchange(rereads_, {});
}

// --- followers ---

void Dispatcher::want_followers(Aggregate& aggregate) {
    if (aggregate.wanted || !aggregate.queue.empty() || !aggregate.active.empty()) {
        return;
    }
    aggregate.wanted = true;
    followers_wanted_.push_back({aggregate.lane->name, aggregate.id});
}

std::vector<Dispatcher::AggregateName> Dispatcher::take_followers_wanted(std::size_t most) {
    std::vector<AggregateName> names;
    while (!followers_wanted_.empty() && names.size() < most) {
        AggregateName name = std::move(followers_wanted_.front());
        followers_wanted_.pop_front();
        if (Aggregate* aggregate = find_aggregate(name.aggregate_type, name.aggregate_id);
            aggregate != nullptr && aggregate->wanted) {
            names.push_back(std::move(name));
        }
    }
    return names;
}

void Dispatcher::followers_read_all(const AggregateName& name) {
    if (Aggregate* aggregate = find_aggregate(name.aggregate_type, name.aggregate_id);
        aggregate != nullptr) {
        aggregate->wanted = false;
        aggregate->waiting = false;
        forget_if_empty(*aggregate);
    }
}

void Dispatcher::followers_read_some(const AggregateName& name) {
    if (Aggregate* aggregate = find_aggregate(name.aggregate_type, name.aggregate_id);
        aggregate != nullptr) {
        aggregate->wanted = false;
        forget_if_empty(*aggregate);
    }
}

void Dispatcher::followers_not_read(const AggregateName& name) {
    if (Aggregate* aggregate = find_aggregate(name.aggregate_type, name.aggregate_id);
        aggregate != nullptr) {
        aggregate->wanted = false;
        want_followers(*aggregate);
    }
}

// --- buckets ---

void Dispatcher::set_buckets(BucketMask mine) {
    const BucketMask lost = mine_ & ~mine;
    mine_ = mine;
    if (lost == 0) {
        return;
    }
    std::vector<Aggregate*> dropped;
    for (const auto& [key, aggregate] : aggregates_) {
        if ((lost & bucket_bit(aggregate->bucket)) != 0) {
            dropped.push_back(aggregate.get());
        }
    }
    for (Aggregate* aggregate : dropped) {
        drop_queue(*aggregate);
        aggregate->wanted = false;
        if (aggregate->held) {
            aggregate->held = false;
            --holds_;
        }
        forget_if_empty(*aggregate);
    }
}

BucketMask Dispatcher::busy_buckets() const noexcept {
    BucketMask busy = 0;
    for (unsigned bucket = 0; bucket < kBuckets; ++bucket) {
        if (active_in_bucket_[bucket] != 0) {
            busy |= bucket_bit(bucket);
        }
    }
    return busy;
}

} // namespace outbox::core
