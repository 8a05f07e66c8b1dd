// What a worker has to read from the table next, lane by lane: a cursor that never goes back, the
// ranges below it that a late commit announced, and the next retry that falls due (DESIGN 2.2).
// Knows numbers, not rows: whether a row is new, held or mine is the dispatcher's business. Not
// thread-safe; no clock.
#pragma once

#include <limits>
#include <map>
#include <unordered_map>

#include "core/types.hpp"

namespace outbox::core {

constexpr std::int64_t kBeforeAll = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kAfterAll = std::numeric_limits<std::int64_t>::max();

// The end of a range that begins with seq; there is nothing before the lowest.
constexpr std::int64_t before(std::int64_t seq) noexcept {
    return seq == kBeforeAll ? kBeforeAll : seq - 1;
}

// Sequence numbers s with after < s <= upto.
struct SeqRange {
    std::int64_t after = kBeforeAll;
    std::int64_t upto = kAfterAll;
    bool operator==(const SeqRange&) const = default;
};

class Scan {
  public:
    // A lane that has rows. One seen for the first time is read from the start, its retries too.
    void discovered(std::string_view lane);

    // A commit inserted rows with lo <= seq <= hi in the lane with this tag. False when no such
    // lane is known: lanes have to be looked for.
    [[nodiscard]] bool announced(std::uint32_t tag, std::int64_t lo, std::int64_t hi);

    // These rows of the lane have to be read again, as far as they were read already.
    void again(std::string_view lane, SeqRange range);

    // Everything has to be read again: the safety poll, new buckets, a lost announcement. Lanes
    // have to be looked for, too: when there are very many, the idle ones are forgotten here.
    void rescan();

    // Some row of the lane waits until `at` (the caller's clock). The earliest is kept.
    void waits_until(std::string_view lane, Micros at);

    // What to read of a lane now: late ranges first, then what follows the cursor. Nothing when all
    // was read.
    [[nodiscard]] std::optional<SeqRange> wanted(std::string_view lane) const;

    // The lane's range, as wanted() gave it, was read up to `seq`, and further rows may follow.
    void read_to(std::string_view lane, SeqRange range, std::int64_t seq);
    // The range was read to its end; `last` is the highest seq seen, if any.
    void read_whole(std::string_view lane, SeqRange range, std::optional<std::int64_t> last);

    // Lanes with something wanted, and lanes with a retry due by `now`.
    [[nodiscard]] std::vector<std::string> lanes_wanted() const;
    [[nodiscard]] std::vector<std::string> lanes_due(Micros now) const;
    // Whether any of them satisfies `suits`, a predicate of its name.
    template <class Predicate>
    [[nodiscard]] bool any_wanted(Predicate&& suits) const {
        for (const auto& [name, lane] : lanes_) {
            if ((lane.more || !lane.late.empty()) && suits(name)) {
                return true;
            }
        }
        return false;
    }
    template <class Predicate>
    [[nodiscard]] bool any_due(Micros now, Predicate&& suits) const {
        for (const auto& [name, lane] : lanes_) {
            if (lane.due && *lane.due <= now && suits(name)) {
                return true;
            }
        }
        return false;
    }
    // The due rows of the lane were all read; the next one falls due at `next`, if any.
    void due_read(std::string_view lane, std::optional<Micros> next);
    // The earliest retry of any lane.
    [[nodiscard]] std::optional<Micros> next_due() const;

    [[nodiscard]] std::size_t lanes() const noexcept { return lanes_.size(); }
    // Forgets all lanes; what they hold is found again by discovery.
    void clear() noexcept;

  private:
    struct Lane {
        std::int64_t cursor = kBeforeAll;
        bool more = true;           // rows may follow the cursor
        std::vector<SeqRange> late; // below the cursor; few
        std::optional<Micros> due;
    };
    void add_late(Lane& lane, SeqRange range);
    Lane* find(std::string_view lane);

    std::map<std::string, Lane, std::less<>> lanes_;
    std::unordered_multimap<std::uint32_t, Lane*> by_tag_; // Lane addresses are stable in a map
};

} // namespace outbox::core
