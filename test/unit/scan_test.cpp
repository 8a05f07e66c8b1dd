// Accidents with reading the table: a row that is never read, a late commit that is passed over, a
// row read before an earlier one, a scan that starts from the beginning without end.
#include "core/scan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "core/bucket.hpp"

namespace outbox::core {
namespace {

constexpr Micros kNow = kHour;

// Reads what is wanted of the lane to the end, as if the table's highest seq was `last`.
void read_all(Scan& scan, const std::string& lane, std::int64_t last) {
    while (const auto range = scan.wanted(lane))
        scan.read_whole(lane, *range,
                        range->upto == kAfterAll ? std::optional{last} : std::nullopt);
}

Scan scan_read_to(std::int64_t last) {
    Scan scan;
    scan.discovered("order");
    read_all(scan, "order", last);
    return scan;
}

bool announce(Scan& scan, std::int64_t lo, std::int64_t hi) {
    return scan.announced(lane_tag("order"), lo, hi);
}

using Wanted = std::optional<SeqRange>;

// --- the cursor ---

TEST(Scan, UnknownLaneIsNotRead) {
    Scan scan;
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
    EXPECT_TRUE(scan.lanes_wanted().empty());
    EXPECT_FALSE(announce(scan, 1, 1)); // so lanes are looked for
    scan.read_to("order", {}, 5);
    scan.read_whole("order", {}, 5);
    scan.due_read("order", kNow);
    scan.again("order", {});
    EXPECT_EQ(scan.lanes(), 0U);
}

TEST(Scan, NewLaneIsReadFromTheStart) {
    Scan scan;
    scan.discovered("order");
    EXPECT_EQ(scan.wanted("order"), (SeqRange{kBeforeAll, kAfterAll}));
    EXPECT_EQ(scan.lanes_wanted(), std::vector<std::string>{"order"});
    EXPECT_EQ(scan.lanes_due(kNow), std::vector<std::string>{"order"}); // its retries, too
}

TEST(Scan, DiscoveringAgainChangesNothing) {
    Scan scan = scan_read_to(10);
    scan.due_read("order", std::nullopt);
    scan.discovered("order");
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
    EXPECT_EQ(scan.next_due(), std::nullopt);
    EXPECT_EQ(scan.lanes(), 1U);
}

TEST(Scan, CursorGoesOnWhereReadingStopped) {
    Scan scan;
    scan.discovered("order");
    scan.read_to("order", *scan.wanted("order"), 7);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{7, kAfterAll}));
    scan.read_to("order", *scan.wanted("order"), 9);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{9, kAfterAll}));
    scan.read_whole("order", *scan.wanted("order"), 12);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
    EXPECT_TRUE(announce(scan, 13, 13));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{12, kAfterAll}));
}

TEST(Scan, EmptyReadKeepsTheCursor) {
    Scan scan = scan_read_to(12);
    EXPECT_TRUE(announce(scan, 13, 20));
    scan.read_whole("order", *scan.wanted("order"), std::nullopt); // rolled back or other's
    EXPECT_TRUE(announce(scan, 14, 14));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{12, kAfterAll}));
}

TEST(Scan, CursorNeverGoesBack) {
    Scan scan = scan_read_to(12);
    EXPECT_TRUE(announce(scan, 13, 13));
    scan.read_to("order", *scan.wanted("order"), 5);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{12, kAfterAll}));
}

// --- late commits ---

TEST(Scan, LateCommitIsReadExactlyAndFirst) {
    Scan scan = scan_read_to(100);
    EXPECT_TRUE(announce(scan, 101, 110));
    EXPECT_TRUE(announce(scan, 40, 42));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{39, 42}));
    scan.read_to("order", {39, 42}, 40);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{40, 42}));
    scan.read_whole("order", {40, 42}, 42);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{100, kAfterAll}));
}

TEST(Scan, CommitAcrossTheCursorIsReadOnBothSides) {
    Scan scan = scan_read_to(100);
    EXPECT_TRUE(announce(scan, 90, 120));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{89, 100}));
    scan.read_whole("order", {89, 100}, std::nullopt);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{100, kAfterAll}));
}

TEST(Scan, CommitAtTheCursorIsLate) {
    Scan scan = scan_read_to(100);
    EXPECT_TRUE(announce(scan, 100, 100));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{99, 100}));
    scan.read_whole("order", {99, 100}, 100);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
}

TEST(Scan, OverlappingLateCommitsAreReadOnce) {
    Scan scan = scan_read_to(100);
    EXPECT_TRUE(announce(scan, 40, 50));
    EXPECT_TRUE(announce(scan, 45, 60));
    EXPECT_TRUE(announce(scan, 61, 61)); // next to it
    EXPECT_EQ(scan.wanted("order"), (SeqRange{39, 61}));
    scan.read_whole("order", {39, 61}, std::nullopt);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
}

TEST(Scan, LateCommitWhileItsRangeIsReadIsNotLost) {
    Scan scan = scan_read_to(100);
    EXPECT_TRUE(announce(scan, 40, 50));
    const SeqRange reading = *scan.wanted("order");
    EXPECT_TRUE(announce(scan, 45, 60)); // the read under way may not see it
    scan.read_whole("order", reading, 50);
    const Wanted rest = scan.wanted("order");
    ASSERT_TRUE(rest);
    EXPECT_LE(rest->after, 44);
    EXPECT_GE(rest->upto, 60);
}

// One commit after the other wrote the same aggregate, each waiting for the one before.
TEST(Scan, LowestLateCommitIsReadFirst) {
    Scan scan = scan_read_to(1000);
    EXPECT_TRUE(announce(scan, 500, 510)); // another aggregate's
    EXPECT_TRUE(announce(scan, 11, 11));
    EXPECT_TRUE(announce(scan, 505, 520));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{10, 11}));
    scan.read_whole("order", {10, 11}, 11);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{499, 520}));
}

TEST(Scan, ManyLateCommitsTakeBoundedMemoryAndAreAllRead) {
    Scan scan = scan_read_to(1'000'000);
    for (std::int64_t seq = 900'000; seq > 0; seq -= 1000)
        EXPECT_TRUE(announce(scan, seq, seq));
    std::set<std::int64_t> unread;
    for (std::int64_t seq = 900'000; seq > 0; seq -= 1000)
        unread.insert(seq);
    int reads = 0;
    while (const auto range = scan.wanted("order")) {
        std::erase_if(unread,
                      [&](std::int64_t seq) { return seq > range->after && seq <= range->upto; });
        scan.read_whole("order", *range, std::nullopt);
        ASSERT_LT(++reads, 50);
    }
    EXPECT_TRUE(unread.empty());
}

TEST(Scan, ExtremeSeqsDoNotOverflow) {
    Scan scan = scan_read_to(5);
    EXPECT_TRUE(announce(scan, kBeforeAll, kBeforeAll + 1));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{kBeforeAll, kBeforeAll + 1}));
    scan.read_whole("order", {kBeforeAll, kBeforeAll + 1}, std::nullopt);
    EXPECT_TRUE(announce(scan, kAfterAll, kAfterAll));
    EXPECT_EQ(scan.wanted("order"), (SeqRange{5, kAfterAll}));
}

// INSERT … OVERRIDING SYSTEM VALUE can do this; the worker must not spin for ever.
TEST(Scan, HighestSeqOfAllIsReadToAnEnd) {
    Scan scan = scan_read_to(kAfterAll);
    EXPECT_TRUE(announce(scan, 10, 12));
    for (int reads = 0; scan.wanted("order") && reads < 5; ++reads)
        scan.read_whole("order", *scan.wanted("order"), std::nullopt);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
    scan.rescan();
    for (int reads = 0; scan.wanted("order") && reads < 5; ++reads)
        scan.read_whole("order", *scan.wanted("order"), kAfterAll);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
}

// --- reading again ---

TEST(Scan, ReadingAgainStopsAtTheCursor) {
    Scan scan = scan_read_to(100);
    scan.again("order", {60, kAfterAll});
    EXPECT_EQ(scan.wanted("order"), (SeqRange{60, 100}));
    scan.read_whole("order", {60, 100}, 100);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
    scan.again("order", {100, kAfterAll}); // not read yet, nothing to repeat
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
    scan.again("order", {69, 70});
    EXPECT_EQ(scan.wanted("order"), (SeqRange{69, 70}));
}

TEST(Scan, RescanReadsEverythingOnceMore) {
    Scan scan = scan_read_to(100);
    scan.due_read("order", std::nullopt);
    EXPECT_TRUE(announce(scan, 30, 40));
    scan.rescan();
    EXPECT_EQ(scan.lanes_due(kNow), std::vector<std::string>{"order"});
    EXPECT_EQ(scan.wanted("order"), (SeqRange{kBeforeAll, 100}));
    scan.read_to("order", {kBeforeAll, 100}, 50);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{50, 100}));
    scan.read_whole("order", {50, 100}, 90);
    EXPECT_EQ(scan.wanted("order"), (SeqRange{100, kAfterAll}));
    scan.read_whole("order", {100, kAfterAll}, std::nullopt);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
}

TEST(Scan, RescanOfAFreshLaneReadsItOnce) {
    Scan scan;
    scan.discovered("order");
    scan.rescan();
    scan.read_whole("order", *scan.wanted("order"), 4);
    EXPECT_EQ(scan.wanted("order"), std::nullopt);
}

TEST(Scan, RescanForgetsLanesWhenThereAreTooMany) {
    Scan scan;
    for (int i = 0; i < 10'000; ++i)
        scan.discovered("lane" + std::to_string(i));
    scan.rescan();
    EXPECT_LE(scan.lanes(), 5000U);
    EXPECT_FALSE(scan.announced(lane_tag("lane1"), 1, 1)); // so it is looked for
    scan.discovered("lane1");
    EXPECT_EQ(scan.wanted("lane1"), (SeqRange{kBeforeAll, kAfterAll}));
    EXPECT_EQ(scan.lanes_due(kNow).size(), scan.lanes());
}

TEST(Scan, ClearForgetsAll) {
    Scan scan = scan_read_to(100);
    scan.clear();
    EXPECT_EQ(scan.lanes(), 0U);
    EXPECT_FALSE(announce(scan, 101, 101));
    EXPECT_EQ(scan.next_due(), std::nullopt);
    scan.discovered("order");
    EXPECT_EQ(scan.wanted("order"), (SeqRange{kBeforeAll, kAfterAll}));
}

// --- several lanes ---

TEST(Scan, AnnouncementIsForItsLaneOnly) {
    Scan scan = scan_read_to(100);
    scan.discovered("customer");
    read_all(scan, "customer", 50);
    EXPECT_TRUE(announce(scan, 101, 101));
    EXPECT_EQ(scan.lanes_wanted(), std::vector<std::string>{"order"});
    EXPECT_EQ(scan.wanted("customer"), std::nullopt);
    EXPECT_FALSE(scan.announced(lane_tag("unknown"), 102, 102));
}

// Two lanes with one tag, found by trying; 2^16 names are enough.
std::pair<std::string, std::string> lanes_with_one_tag() {
    std::map<std::uint32_t, std::string> seen;
    for (int i = 0;; ++i) {
        std::string name = "lane" + std::to_string(i);
        const auto [it, added] = seen.emplace(lane_tag(name), name);
        if (!added)
            return {it->second, name};
    }
}

TEST(Scan, LanesThatShareATagAreBothRead) {
    const auto [one, other] = lanes_with_one_tag();
    Scan scan;
    scan.discovered(one);
    scan.discovered(other);
    read_all(scan, one, 100);
    read_all(scan, other, 10);
    EXPECT_TRUE(scan.announced(lane_tag(one), 50, 60));
    EXPECT_EQ(scan.wanted(one), (SeqRange{49, 60}));
    EXPECT_EQ(scan.wanted(other), (SeqRange{10, kAfterAll}));
}

TEST(Scan, ThousandsOfLanesAreAllRead) {
    Scan scan;
    for (int i = 0; i < 4000; ++i)
        scan.discovered("lane" + std::to_string(i));
    EXPECT_EQ(scan.lanes_wanted().size(), 4000U);
    for (const std::string& lane : scan.lanes_wanted())
        read_all(scan, lane, 1);
    EXPECT_TRUE(scan.lanes_wanted().empty());
    for (int i = 0; i < 4000; ++i)
        EXPECT_TRUE(scan.announced(lane_tag("lane" + std::to_string(i)), 2, 2));
    EXPECT_EQ(scan.lanes_wanted().size(), 4000U);
}

// --- retries ---

TEST(Scan, EarliestRetryIsKept) {
    Scan scan = scan_read_to(100);
    scan.due_read("order", std::nullopt);
    scan.waits_until("order", kNow + 5 * kSecond);
    scan.waits_until("order", kNow + 2 * kSecond);
    scan.waits_until("order", kNow + 9 * kSecond);
    EXPECT_EQ(scan.next_due(), kNow + 2 * kSecond);
    EXPECT_TRUE(scan.lanes_due(kNow + 2 * kSecond - 1).empty());
    EXPECT_EQ(scan.lanes_due(kNow + 2 * kSecond), std::vector<std::string>{"order"});
}

TEST(Scan, DueReadTellsTheNextOne) {
    Scan scan = scan_read_to(100);
    scan.due_read("order", kNow + kSecond);
    EXPECT_EQ(scan.next_due(), kNow + kSecond);
    scan.due_read("order", std::nullopt);
    EXPECT_EQ(scan.next_due(), std::nullopt);
    EXPECT_TRUE(scan.lanes_due(std::numeric_limits<Micros>::max()).empty());
}

TEST(Scan, RetryInAnUnknownLaneIsNotForgotten) {
    Scan scan;
    scan.waits_until("order", kNow);
    EXPECT_EQ(scan.lanes(), 1U);
    EXPECT_EQ(scan.lanes_due(kNow), std::vector<std::string>{"order"});
    EXPECT_TRUE(scan.wanted("order")); // its other rows, too
}

TEST(Scan, EarliestLaneIsNextDue) {
    Scan scan = scan_read_to(100);
    scan.discovered("customer");
    scan.due_read("order", kNow + 2 * kSecond);
    scan.due_read("customer", kNow + kSecond);
    EXPECT_EQ(scan.next_due(), kNow + kSecond);
    EXPECT_EQ(scan.lanes_due(kNow + kSecond), std::vector<std::string>{"customer"});
    EXPECT_EQ(scan.lanes_due(kNow + 2 * kSecond).size(), 2U);
}

// --- whatever happens, every row is read ---

// Commits in any order, reads of any size, now and then everything once more: each committed row is
// read after its commit, and a late range never hides another.
TEST(Scan, EveryCommittedRowIsReadInTheEnd) {
    for (std::uint32_t seed = 1; seed <= 300; ++seed) {
        std::mt19937 random(seed);
        const auto pick = [&random](int from, int to) {
            return std::uniform_int_distribution<int>{from, to}(random);
        };
        Scan scan;
        scan.discovered("order");
        std::set<std::int64_t> unread; // committed
        std::vector<std::int64_t> open;
        std::int64_t last = 0;
        const auto read = [&](int limit) {
            const auto range = scan.wanted("order");
            if (!range)
                return;
            auto it = unread.upper_bound(range->after);
            std::optional<std::int64_t> seen;
            for (; it != unread.end() && *it <= range->upto && limit > 0; --limit) {
                seen = *it;
                it = unread.erase(it);
            }
            if (limit > 0)
                scan.read_whole("order", *range, seen);
            else if (seen)
                scan.read_to("order", *range, *seen);
        };
        for (int step = 0; step < 200; ++step) {
            const int dice = pick(1, 100);
            if (dice <= 40) {
                open.push_back(++last);
            } else if (dice <= 70 && !open.empty()) {
                const auto at = open.begin() + pick(0, static_cast<int>(open.size()) - 1);
                unread.insert(*at);
                EXPECT_TRUE(announce(scan, *at, *at));
                open.erase(at);
            } else if (dice <= 98) {
                read(pick(1, 5));
            } else {
                scan.rescan();
            }
        }
        for (int reads = 0; scan.wanted("order"); ++reads) {
            ASSERT_LT(reads, 1000) << "seed " << seed;
            read(3);
        }
        EXPECT_TRUE(unread.empty()) << "seed " << seed << ", seq " << *unread.begin();
    }
}

} // namespace
} // namespace outbox::core
