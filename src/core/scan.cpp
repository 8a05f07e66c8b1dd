// See scan.hpp.
#include "core/scan.hpp"

#include <algorithm>

#include "core/bucket.hpp"

namespace outbox::core {

namespace {
// More late ranges than this are joined into one that covers them: correct, at worst slower.
constexpr std::size_t kMaxLateRanges = 16;
// Lanes kept over a rescan, idle or not; bounds memory where types come and go without end.
constexpr std::size_t kMaxKeptLanes = 4096;
} // namespace

Scan::Lane* Scan::find(std::string_view lane) {
    const auto it = lanes_.find(lane);
    return it == lanes_.end() ? nullptr : &it->second;
}

void Scan::discovered(std::string_view name) {
    if (find(name) != nullptr) {
        return;
    }
    Lane& lane = lanes_.emplace(std::string{name}, Lane{}).first->second;
    lane.due = std::numeric_limits<Micros>::min();
    by_tag_.emplace(lane_tag(name), &lane);
}

bool Scan::announced(std::uint32_t tag, std::int64_t lo, std::int64_t hi) {
    const auto [first, last] = by_tag_.equal_range(tag);
    for (auto it = first; it != last; ++it) {
        Lane& lane = *it->second;
        if (hi > lane.cursor) {
            lane.more = true;
        }
        if (lo <= lane.cursor) {
            add_late(lane, {before(lo), std::min(hi, lane.cursor)});
        }
    }
    return first != last;
}

void Scan::again(std::string_view name, SeqRange range) {
    if (Lane* lane = find(name); lane != nullptr && range.after < lane->cursor) {
        add_late(*lane, {range.after, std::min(range.upto, lane->cursor)});
    }
}

void Scan::rescan() {
    if (lanes_.size() > kMaxKeptLanes) {
        clear();
    }
    for (auto& [name, lane] : lanes_) {
        lane.late.clear();
        if (lane.cursor != kBeforeAll) {
            lane.late.push_back({kBeforeAll, lane.cursor});
        }
        lane.more = true;
        lane.due = std::numeric_limits<Micros>::min();
    }
}

void Scan::add_late(Lane& lane, SeqRange range) {
    // Lowest first, and none touches another: what committed earlier is never passed.
    std::erase_if(lane.late, [&range](const SeqRange& known) {
        const bool touches = range.after <= known.upto && known.after <= range.upto;
        if (touches) {
            range = {std::min(known.after, range.after), std::max(known.upto, range.upto)};
        }
        return touches;
    });
    lane.late.insert(std::ranges::upper_bound(lane.late, range.after, {}, &SeqRange::after), range);
    if (lane.late.size() > kMaxLateRanges) {
        const SeqRange all = {lane.late.front().after, lane.late.back().upto};
        lane.late.assign(1, all);
    }
}

void Scan::waits_until(std::string_view name, Micros at) {
    discovered(name);
    Lane& lane = *find(name);
    lane.due = std::min(lane.due.value_or(at), at);
}

std::optional<SeqRange> Scan::wanted(std::string_view name) const {
    const auto it = lanes_.find(name);
    if (it == lanes_.end()) {
        return std::nullopt;
    }
    const Lane& lane = it->second;
    if (!lane.late.empty()) {
        return lane.late.front();
    }
    return lane.more && lane.cursor < kAfterAll ? std::optional<SeqRange>{{lane.cursor, kAfterAll}}
                                                : std::nullopt;
}

void Scan::read_to(std::string_view name, SeqRange range, std::int64_t seq) {
    Lane* lane = find(name);
    if (lane == nullptr) {
        return;
    }
    if (const auto it = std::ranges::find(lane->late, range); it != lane->late.end()) {
        it->after = std::max(it->after, seq);
    } else if (range.upto == kAfterAll) {
        lane->cursor = std::max(lane->cursor, seq);
    }
}

void Scan::read_whole(std::string_view name, SeqRange range, std::optional<std::int64_t> last) {
    Lane* lane = find(name);
    if (lane == nullptr) {
        return;
    }
    if (const auto it = std::ranges::find(lane->late, range); it != lane->late.end()) {
        lane->late.erase(it);
    } else if (range.upto == kAfterAll) {
        lane->cursor = std::max(lane->cursor, last.value_or(lane->cursor));
        lane->more = false;
    }
}

std::vector<std::string> Scan::lanes_wanted() const {
    std::vector<std::string> names;
    for (const auto& [name, lane] : lanes_) {
        if (lane.more || !lane.late.empty()) {
            names.push_back(name);
        }
    }
    return names;
}

std::vector<std::string> Scan::lanes_due(Micros now) const {
    std::vector<std::string> names;
    for (const auto& [name, lane] : lanes_) {
        if (lane.due && *lane.due <= now) {
            names.push_back(name);
        }
    }
    return names;
}

void Scan::due_read(std::string_view name, std::optional<Micros> next) {
    if (Lane* lane = find(name); lane != nullptr) {
        lane->due = next;
    }
}

std::optional<Micros> Scan::next_due() const {
    std::optional<Micros> earliest;
    for (const auto& [name, lane] : lanes_) {
        if (lane.due && (!earliest || *lane.due < *earliest)) {
            earliest = lane.due;
        }
    }
    return earliest;
}

void Scan::clear() noexcept {
    by_tag_.clear();
    lanes_.clear();
}

} // namespace outbox::core
