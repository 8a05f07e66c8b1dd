// Accidents with dispatching: an event that overtakes an earlier one of its aggregate, two of them
// under way at once, an aggregate that stands still for ever, one lane that takes all the room.
#include "core/dispatch.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace outbox::core {
namespace {

constexpr auto kClosed = Settled::closed;
constexpr auto kWaiting = Settled::waiting;
constexpr auto kChanged = Settled::changed;

using Seqs = std::vector<std::int64_t>;

// A row as a claim finds it.
struct Row {
    std::int64_t seq = 0;
    std::string aggregate = "a";
    std::string lane = "order";
    std::size_t bytes = 1;
};

Uuid id_of(std::int64_t seq) {
    Uuid id;
    for (std::size_t i = 0; i < 8; ++i)
        id.bytes.at(i) = static_cast<std::uint8_t>(static_cast<std::uint64_t>(seq) >> (8 * i));
    return id;
}

class Dispatch : public testing::Test {
  protected:
    Dispatch() { dispatcher.set_buckets(kAllBuckets); }

    void limit(std::size_t in_flight, std::size_t rows = 400, std::size_t bytes = 1'000'000) {
        dispatcher.set_limits({.max_in_flight = in_flight, .max_bytes = bytes, .max_rows = rows});
    }

    // As a claim does with each row it reads.
    Admission claim(const Row& row, Source source = Source::ready,
                    std::optional<std::int64_t> earlier = std::nullopt) {
        const Admission admission =
            dispatcher.examine(id_of(row.seq), row.lane, row.aggregate, source, earlier);
        if (admission == Admission::queued) {
            if (!dispatcher.byte_room(row.lane, row.bytes))
                return Admission::full;
            Event event;
            event.id = id_of(row.seq);
            event.seq = row.seq;
            event.aggregate_type = row.lane;
            event.aggregate_id = row.aggregate;
            event.payload.assign(row.bytes, 'x');
            event.row.block = static_cast<std::uint32_t>(row.seq);
            dispatcher.admit(std::move(event), source);
        } else if (admission == Admission::park) {
            dispatcher.parked(row.lane, row.aggregate);
        }
        return admission;
    }

    // All that may start, in the order of starting.
    Seqs start() {
        Seqs seqs;
        while (const Event* event = dispatcher.next())
            seqs.push_back(event->seq);
        return seqs;
    }

    void settle(std::int64_t seq, Settled how) {
        dispatcher.answered(id_of(seq));
        dispatcher.settled(id_of(seq), how);
    }

    Seqs parking() {
        Seqs seqs;
        for (const Dispatcher::Parking& parking : dispatcher.take_parking()) {
            EXPECT_EQ(parking.aggregate_type, "order");
            EXPECT_EQ(parking.aggregate_id, "a");
            seqs.push_back(parking.row.block);
        }
        std::ranges::sort(seqs);
        return seqs;
    }

    // "type/id" of the aggregates whose followers are wanted.
    std::vector<std::string> followers() {
        std::vector<std::string> names;
        for (const auto& name : dispatcher.take_followers_wanted(1000))
            names.push_back(name.aggregate_type + '/' + name.aggregate_id);
        return names;
    }

    void expect_empty() {
        EXPECT_EQ(start(), Seqs{});
        EXPECT_EQ(dispatcher.held_events(), 0U);
        EXPECT_EQ(dispatcher.held_bytes(), 0U);
        EXPECT_EQ(dispatcher.queued(), 0U);
        EXPECT_EQ(dispatcher.in_flight(), 0U);
        EXPECT_EQ(dispatcher.busy_buckets(), 0U);
        EXPECT_FALSE(dispatcher.wants_parking());
    }

    Dispatcher dispatcher{DispatchLimits{}};
};

const Dispatcher::AggregateName kA{"order", "a"};

// --- order ---

TEST_F(Dispatch, NothingStartsBeforeItIsClaimed) {
    EXPECT_EQ(dispatcher.next(), nullptr);
    dispatcher.answered(id_of(1));
    dispatcher.settled(id_of(1), kClosed);
    dispatcher.release_payload(id_of(1));
    expect_empty();
}

TEST_F(Dispatch, NoBucketsNoEvents) {
    Dispatcher fresh{DispatchLimits{}};
    EXPECT_EQ(fresh.examine(id_of(1), "order", "a", Source::ready, {}), Admission::foreign);
}

TEST_F(Dispatch, AggregatesGoOneAtATimeInOrder) {
    for (const std::int64_t seq : {1, 2, 3})
        EXPECT_EQ(claim({.seq = seq}), Admission::queued);
    EXPECT_EQ(start(), Seqs{1});
    EXPECT_EQ(start(), Seqs{});
    dispatcher.answered(id_of(1)); // not yet recorded
    EXPECT_EQ(start(), Seqs{});
    EXPECT_EQ(dispatcher.in_flight(), 0U);
    dispatcher.settled(id_of(1), kClosed);
    EXPECT_EQ(start(), Seqs{2});
    settle(2, kClosed);
    EXPECT_EQ(start(), Seqs{3});
    settle(3, kClosed);
    EXPECT_TRUE(followers().empty());
    expect_empty();
}

TEST_F(Dispatch, DifferentAggregatesGoTogether) {
    for (const std::int64_t seq : {1, 2, 3})
        claim({.seq = seq, .aggregate = std::to_string(seq)});
    EXPECT_EQ(start(), (Seqs{1, 2, 3}));
}

TEST_F(Dispatch, SameIdInAnotherLaneIsAnotherAggregate) {
    claim({.seq = 1, .lane = "order"});
    claim({.seq = 2, .lane = "customer"});
    claim({.seq = 3, .aggregate = "bc", .lane = "a"});
    claim({.seq = 4, .aggregate = "c", .lane = "ab"});
    EXPECT_EQ(start().size(), 4U);
}

TEST_F(Dispatch, LateLowerSeqGoesBeforeThoseThatWait) {
    claim({.seq = 10});
    claim({.seq = 20});
    EXPECT_EQ(start(), Seqs{10});
    claim({.seq = 5});
    claim({.seq = 15});
    for (const std::int64_t seq : {10, 5, 15, 20}) {
        settle(seq, kClosed);
        start();
    }
    expect_empty();
}

TEST_F(Dispatch, ClaimedTwiceIsSentOnce) {
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
    EXPECT_EQ(claim({.seq = 1}), Admission::known);
    EXPECT_EQ(start(), Seqs{1});
    EXPECT_EQ(claim({.seq = 1}), Admission::known);
    dispatcher.answered(id_of(1));
    EXPECT_EQ(claim({.seq = 1}), Admission::known);
    dispatcher.settled(id_of(1), kClosed);
    expect_empty();
}

TEST_F(Dispatch, AnsweredAndSettledTwiceCountsOnce) {
    claim({.seq = 1});
    claim({.seq = 2, .aggregate = "b"});
    EXPECT_EQ(start(), (Seqs{1, 2}));
    dispatcher.answered(id_of(1));
    dispatcher.answered(id_of(1));
    EXPECT_EQ(dispatcher.in_flight(), 1U);
    dispatcher.settled(id_of(1), kClosed);
    dispatcher.settled(id_of(1), kClosed);
    EXPECT_EQ(dispatcher.held_events(), 1U);
    dispatcher.settled(id_of(2), kClosed); // without answered(): our own abort
    expect_empty();
}

TEST_F(Dispatch, QueuedEventIsNotSettled) {
    claim({.seq = 1});
    settle(1, kClosed);
    EXPECT_EQ(start(), Seqs{1});
}

// --- parking ---

TEST_F(Dispatch, EarlierRowThatWaitsInTheTableParks) {
    EXPECT_EQ(claim({.seq = 5}, Source::ready, 3), Admission::park);
    EXPECT_EQ(claim({.seq = 6}, Source::due, 3), Admission::park);
    EXPECT_EQ(claim({.seq = 7, .aggregate = "b"}), Admission::queued);
    EXPECT_EQ(start(), Seqs{7});
}

TEST_F(Dispatch, EarlierRowInMemoryDoesNotPark) {
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
    EXPECT_EQ(claim({.seq = 2}, Source::ready, 1), Admission::queued);
    EXPECT_EQ(start(), Seqs{1});
    EXPECT_EQ(claim({.seq = 3}, Source::ready, 1), Admission::queued); // in flight
    EXPECT_EQ(claim({.seq = 4}, Source::ready, 2), Admission::queued); // queued
    EXPECT_EQ(claim({.seq = 5}, Source::ready, 0), Admission::park);   // another one
}

TEST_F(Dispatch, AfterOneIsParkedAllLaterOnesAre) {
    claim({.seq = 1});
    EXPECT_EQ(claim({.seq = 5}, Source::ready, 3), Admission::park);
    EXPECT_EQ(claim({.seq = 6}), Admission::park);
    EXPECT_EQ(start(), Seqs{1});
    settle(1, kClosed);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

TEST_F(Dispatch, RetryThatIsDueParksWhatComesLater) {
    EXPECT_EQ(claim({.seq = 1}, Source::due), Admission::queued);
    EXPECT_EQ(claim({.seq = 2}, Source::ready, 1), Admission::park);
    EXPECT_EQ(start(), Seqs{1});
    settle(1, kClosed);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

TEST_F(Dispatch, HotAggregateTakesBoundedMemory) {
    for (std::int64_t seq = 1; seq <= static_cast<std::int64_t>(kMaxFollowers); ++seq)
        EXPECT_EQ(claim({.seq = seq}), Admission::queued) << seq;
    EXPECT_EQ(claim({.seq = 100}), Admission::park);
    EXPECT_EQ(start(), Seqs{1});
    EXPECT_EQ(claim({.seq = 101}), Admission::park); // the one in flight counts
    settle(1, kClosed);
    EXPECT_EQ(claim({.seq = 102}), Admission::park); // room, but 100 waits
    for (std::int64_t seq = 2; seq <= static_cast<std::int64_t>(kMaxFollowers); ++seq) {
        EXPECT_TRUE(followers().empty());
        EXPECT_EQ(start(), Seqs{seq});
        settle(seq, kClosed);
    }
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

TEST_F(Dispatch, ParkedRowsBeyondTheBoundAreLeftForLater) {
    for (std::int64_t seq = 1; seq <= static_cast<std::int64_t>(kMaxFollowers); ++seq)
        EXPECT_EQ(claim({.seq = seq}, Source::parked), Admission::queued);
    EXPECT_EQ(claim({.seq = 100}, Source::parked), Admission::full);
}

// --- results ---

TEST_F(Dispatch, FailureParksTheFollowers) {
    for (const std::int64_t seq : {1, 2, 3})
        claim({.seq = seq});
    claim({.seq = 9, .aggregate = "b"});
    EXPECT_EQ(start(), (Seqs{1, 9}));
    EXPECT_FALSE(dispatcher.wants_parking());
    settle(1, kWaiting);
    EXPECT_TRUE(dispatcher.wants_parking());
    EXPECT_EQ(parking(), (Seqs{2, 3}));
    EXPECT_EQ(parking(), Seqs{}); // once
    EXPECT_EQ(start(), Seqs{});
    EXPECT_TRUE(followers().empty()); // the head is not done
    settle(9, kClosed);
    expect_empty();
}

TEST_F(Dispatch, FailedHeadComesBackAndItsFollowersAfterIt) {
    claim({.seq = 1});
    claim({.seq = 2});
    start();
    settle(1, kWaiting);
    EXPECT_EQ(parking(), Seqs{2});
    EXPECT_EQ(claim({.seq = 3}, Source::ready, 1), Admission::park);
    EXPECT_EQ(claim({.seq = 1}, Source::due), Admission::queued);
    EXPECT_EQ(start(), Seqs{1});
    settle(1, kClosed);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
    EXPECT_EQ(claim({.seq = 2}, Source::parked), Admission::queued);
    EXPECT_EQ(claim({.seq = 3}, Source::parked), Admission::queued);
    dispatcher.followers_read_all(kA);
    EXPECT_EQ(claim({.seq = 4}, Source::ready, 2), Admission::queued); // all is in memory again
    EXPECT_EQ(start(), Seqs{2});
    settle(2, kClosed);
    EXPECT_EQ(start(), Seqs{3});
    settle(3, kClosed);
    EXPECT_EQ(start(), Seqs{4});
    settle(4, kClosed);
    EXPECT_TRUE(followers().empty());
    expect_empty();
}

// It waits behind nobody; parked, it would wait until somebody looks for aggregates without a head.
TEST_F(Dispatch, LateLowerSeqIsNotParkedBehindALaterFailure) {
    claim({.seq = 8});
    claim({.seq = 12});
    EXPECT_EQ(start(), Seqs{8});
    claim({.seq = 1});
    settle(8, kWaiting);
    EXPECT_EQ(parking(), Seqs{12});
    EXPECT_EQ(start(), Seqs{1});
    settle(1, kClosed);
    EXPECT_EQ(claim({.seq = 8}, Source::due), Admission::queued);
    EXPECT_EQ(start(), Seqs{8});
}

TEST_F(Dispatch, DeadHeadLetsItsFollowersGo) {
    claim({.seq = 1}, Source::due);
    claim({.seq = 2}, Source::ready, 1);
    start();
    settle(1, kClosed); // dead is closed, too
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

TEST_F(Dispatch, ChangedRowIsReadAgainBeforeItsFollowers) {
    for (const std::int64_t seq : {5, 6, 7})
        claim({.seq = seq});
    start();
    settle(5, kChanged);
    const auto rereads = dispatcher.take_rereads();
    ASSERT_EQ(rereads.size(), 1U);
    EXPECT_EQ(rereads[0].lane, "order");
    EXPECT_EQ(rereads[0].range, (SeqRange{4, kAfterAll}));
    EXPECT_TRUE(dispatcher.take_rereads().empty());
    EXPECT_EQ(parking(), Seqs{});
    expect_empty();
    EXPECT_EQ(claim({.seq = 5}), Admission::queued); // anew
    EXPECT_EQ(claim({.seq = 6}), Admission::queued);
    EXPECT_EQ(start(), Seqs{5});
}

TEST_F(Dispatch, ChangedRowHoldsUpNoOtherAggregate) {
    claim({.seq = 5});
    claim({.seq = 6, .aggregate = "b"});
    start();
    claim({.seq = 7, .aggregate = "b"});
    settle(5, kChanged);
    settle(6, kClosed);
    EXPECT_EQ(start(), Seqs{7});
}

TEST_F(Dispatch, LowestSeqOfAllCanBeReadAgain) {
    claim({.seq = kBeforeAll});
    start();
    settle(kBeforeAll, kChanged);
    const auto rereads = dispatcher.take_rereads();
    ASSERT_EQ(rereads.size(), 1U);
    EXPECT_EQ(rereads[0].range.after, kBeforeAll);
}

// --- followers ---

TEST_F(Dispatch, OrphansAreWantedWhenNothingOfThemIsInMemory) {
    dispatcher.orphaned("order", "a");
    EXPECT_TRUE(dispatcher.wants_followers());
    EXPECT_EQ(claim({.seq = 9}), Admission::park); // behind them
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
    EXPECT_EQ(claim({.seq = 3}, Source::parked), Admission::queued);
    dispatcher.followers_read_some(kA);
    EXPECT_EQ(start(), Seqs{3});
    settle(3, kClosed);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"}); // the rest
    EXPECT_EQ(claim({.seq = 9}, Source::parked), Admission::queued);
    dispatcher.followers_read_all(kA);
    EXPECT_EQ(start(), Seqs{9});
    settle(9, kClosed);
    EXPECT_TRUE(followers().empty());
    expect_empty();
}

TEST_F(Dispatch, OrphansOfAnAggregateInMemoryWaitForIt) {
    claim({.seq = 1});
    dispatcher.orphaned("order", "a");
    EXPECT_FALSE(dispatcher.wants_followers());
    EXPECT_EQ(claim({.seq = 9}), Admission::park);
    start();
    EXPECT_FALSE(dispatcher.wants_followers());
    settle(1, kClosed);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

TEST_F(Dispatch, FollowersAreWantedOnce) {
    for (int i = 0; i < 3; ++i)
        dispatcher.orphaned("order", "a");
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
    dispatcher.orphaned("order", "a");
    EXPECT_TRUE(followers().empty()); // being read
}

TEST_F(Dispatch, FollowersNotReadAreWantedAgain) {
    dispatcher.orphaned("order", "a");
    EXPECT_EQ(followers().size(), 1U);
    EXPECT_FALSE(dispatcher.wants_followers());
    dispatcher.followers_not_read(kA);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
    dispatcher.followers_read_all(kA);
    EXPECT_TRUE(followers().empty());
    EXPECT_EQ(claim({.seq = 9}), Admission::queued); // nothing waits any more
}

TEST_F(Dispatch, NoMoreFollowersThanAskedFor) {
    for (int i = 0; i < 10; ++i)
        dispatcher.orphaned("order", std::to_string(i));
    EXPECT_EQ(dispatcher.take_followers_wanted(4).size(), 4U);
    EXPECT_EQ(dispatcher.take_followers_wanted(4).size(), 4U);
    EXPECT_EQ(dispatcher.take_followers_wanted(4).size(), 2U);
    EXPECT_FALSE(dispatcher.wants_followers());
}

TEST_F(Dispatch, ReportsOnUnknownAggregatesAreIgnored) {
    dispatcher.followers_read_all(kA);
    dispatcher.followers_read_some(kA);
    dispatcher.followers_not_read(kA);
    dispatcher.parked("order", "a");
    EXPECT_FALSE(dispatcher.wants_followers());
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
}

// --- rows that somebody locked ---

TEST_F(Dispatch, HeldAggregateStandsStillOthersGo) {
    claim({.seq = 1});
    claim({.seq = 2});
    claim({.seq = 3, .aggregate = "b"});
    dispatcher.hold("order", "a");
    dispatcher.hold("order", "a");
    EXPECT_EQ(start(), Seqs{3});
    EXPECT_EQ(claim({.seq = 2}), Admission::held);
    EXPECT_EQ(claim({.seq = 2}, Source::due), Admission::held);
    EXPECT_EQ(claim({.seq = 2}, Source::parked), Admission::held);
    EXPECT_EQ(parking(), Seqs{});
    settle(3, kClosed);
    dispatcher.release_holds();
    expect_empty();
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
    EXPECT_EQ(start(), Seqs{1});
}

TEST_F(Dispatch, HoldWhileOneIsInFlight) {
    claim({.seq = 1});
    claim({.seq = 2});
    start();
    dispatcher.hold("order", "a");
    settle(1, kClosed);
    EXPECT_EQ(start(), Seqs{});
    EXPECT_EQ(claim({.seq = 2}), Admission::held);
    dispatcher.release_holds();
    dispatcher.release_holds();
    EXPECT_EQ(claim({.seq = 2}), Admission::queued);
    EXPECT_EQ(start(), Seqs{2});
    settle(2, kClosed);
    expect_empty();
}

TEST_F(Dispatch, HoldOfAnUnknownAggregateCounts) {
    dispatcher.hold("order", "a");
    EXPECT_EQ(claim({.seq = 1}), Admission::held);
    dispatcher.release_holds();
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
}

TEST_F(Dispatch, ReleaseBeforeTheNextStartIsNoAccident) {
    claim({.seq = 1});
    dispatcher.hold("order", "a"); // the only one of its lane, and listed to start
    dispatcher.release_holds();
    EXPECT_EQ(start(), Seqs{});
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
    EXPECT_EQ(start(), Seqs{1});
}

TEST_F(Dispatch, ParkedRowsDroppedByAHoldAreNotPassed) {
    dispatcher.orphaned("order", "a");
    followers();
    claim({.seq = 1}, Source::parked);
    claim({.seq = 2}, Source::parked);
    dispatcher.followers_read_all(kA);
    EXPECT_EQ(start(), Seqs{1});
    dispatcher.hold("order", "a");
    dispatcher.release_holds();
    EXPECT_EQ(claim({.seq = 3}, Source::ready, 1), Admission::park); // 2 waits in the table
    settle(1, kClosed);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

// --- buckets ---

BucketMask bucket_of_a() {
    return bucket_bit(bucket_of("order", "a"));
}

TEST_F(Dispatch, LostBucketIsLeftAlone) {
    claim({.seq = 1});
    claim({.seq = 2});
    dispatcher.set_buckets(kAllBuckets & ~bucket_of_a());
    EXPECT_EQ(dispatcher.buckets(), kAllBuckets & ~bucket_of_a());
    EXPECT_EQ(claim({.seq = 1}), Admission::foreign);
    dispatcher.orphaned("order", "a");
    EXPECT_FALSE(dispatcher.wants_followers());
    expect_empty();
}

// The last aggregate of its lane was listed to start when its bucket went.
TEST_F(Dispatch, LostBucketWithEventsAboutToStart) {
    claim({.seq = 1});
    dispatcher.set_buckets(0);
    EXPECT_EQ(start(), Seqs{});
    EXPECT_EQ(start(), Seqs{});
    dispatcher.set_buckets(kAllBuckets);
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
    EXPECT_EQ(start(), Seqs{1});
    settle(1, kClosed);
    expect_empty();
}

TEST_F(Dispatch, LostBucketIsBusyUntilItsEventIsRecorded) {
    claim({.seq = 1});
    claim({.seq = 2});
    start();
    EXPECT_EQ(dispatcher.busy_buckets(), bucket_of_a());
    dispatcher.set_buckets(0);
    EXPECT_EQ(dispatcher.busy_buckets(), bucket_of_a());
    EXPECT_EQ(dispatcher.held_events(), 1U);
    dispatcher.answered(id_of(1));
    EXPECT_EQ(dispatcher.busy_buckets(), bucket_of_a());
    dispatcher.settled(id_of(1), kClosed);
    EXPECT_EQ(parking(), Seqs{});
    expect_empty();
}

TEST_F(Dispatch, BucketThatComesBackWhileItIsBusyKeepsOrder) {
    claim({.seq = 1}, Source::due);
    EXPECT_EQ(claim({.seq = 2}, Source::ready, 1), Admission::park);
    start();
    dispatcher.set_buckets(0);
    dispatcher.set_buckets(kAllBuckets);
    EXPECT_EQ(claim({.seq = 3}, Source::ready, 1), Admission::park); // 2 waits in the table
    settle(1, kClosed);
    EXPECT_EQ(start(), Seqs{});
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

// Dropped before it started, it is still the head of its aggregate.
TEST_F(Dispatch, HeadThatIsReadAgainIsNotParked) {
    claim({.seq = 1}, Source::due);
    dispatcher.set_buckets(0);
    dispatcher.set_buckets(kAllBuckets);
    EXPECT_EQ(claim({.seq = 1}, Source::due), Admission::queued);
    dispatcher.hold("order", "a");
    dispatcher.release_holds();
    EXPECT_EQ(claim({.seq = 1}, Source::due), Admission::queued);
    EXPECT_EQ(start(), Seqs{1});
}

TEST_F(Dispatch, BucketThatComesBackForgetsNoFollowers) {
    dispatcher.orphaned("order", "a");
    followers();
    claim({.seq = 1}, Source::parked);
    claim({.seq = 2}, Source::parked);
    dispatcher.followers_read_all(kA);
    start();
    dispatcher.set_buckets(0);
    dispatcher.set_buckets(kAllBuckets);
    EXPECT_EQ(claim({.seq = 3}, Source::ready, 1), Admission::park);
    settle(1, kClosed);
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
}

TEST_F(Dispatch, LostBucketTakesItsHoldsAndWishesAlong) {
    dispatcher.hold("order", "a");
    dispatcher.orphaned("order", "b");
    dispatcher.set_buckets(0);
    EXPECT_TRUE(followers().empty());
    dispatcher.set_buckets(kAllBuckets);
    EXPECT_EQ(claim({.seq = 1}), Admission::queued);
    dispatcher.release_holds();
    EXPECT_EQ(start(), Seqs{1});
}

TEST_F(Dispatch, OtherBucketsGoOn) {
    claim({.seq = 1});
    std::string other = "b";
    while (bucket_of("order", other) == bucket_of("order", "a"))
        other += 'b';
    claim({.seq = 2, .aggregate = other});
    dispatcher.set_buckets(kAllBuckets & ~bucket_of_a());
    EXPECT_EQ(start(), Seqs{2});
}

// --- shares of the slots ---

TEST_F(Dispatch, SlotsAreNeverExceeded) {
    limit(1);
    claim({.seq = 1, .aggregate = "1"});
    claim({.seq = 2, .aggregate = "2"});
    EXPECT_EQ(start(), Seqs{1});
    settle(1, kClosed);
    EXPECT_EQ(start(), Seqs{2});
}

TEST_F(Dispatch, LaneAloneGetsHalfOfTheSlots) {
    limit(100);
    for (std::int64_t seq = 1; seq <= 150; ++seq)
        claim({.seq = seq, .aggregate = std::to_string(seq)});
    EXPECT_EQ(start().size(), 50U);
}

TEST_F(Dispatch, LanesShareTheSlots) {
    limit(99, 1000);
    for (std::int64_t seq = 1; seq <= 150; ++seq) {
        claim({.seq = seq, .aggregate = std::to_string(seq), .lane = "order"});
        claim({.seq = 1000 + seq, .aggregate = std::to_string(seq), .lane = "customer"});
    }
    const Seqs started = start();
    const auto orders = std::ranges::count_if(started, [](std::int64_t seq) { return seq < 1000; });
    EXPECT_EQ(orders, 33);
    EXPECT_EQ(started.size(), 66U);
}

TEST_F(Dispatch, StuckLaneLeavesSlotsToOthers) {
    limit(4);
    for (std::int64_t seq = 1; seq <= 20; ++seq)
        claim({.seq = seq, .aggregate = std::to_string(seq), .lane = "stuck"});
    EXPECT_EQ(start(), (Seqs{1, 2}));
    for (std::int64_t seq = 101; seq <= 110; ++seq) {
        claim({.seq = seq, .aggregate = std::to_string(seq), .lane = "fast"});
        EXPECT_EQ(start(), Seqs{seq});
        settle(seq, kClosed);
    }
}

TEST_F(Dispatch, LanesTakeTurns) {
    limit(1);
    for (std::int64_t seq = 1; seq <= 6; ++seq)
        claim({.seq = seq, .aggregate = std::to_string(seq), .lane = seq <= 4 ? "big" : "small"});
    Seqs order;
    for (int i = 0; i < 6; ++i) {
        const Seqs started = start();
        ASSERT_EQ(started.size(), 1U);
        order.push_back(started[0]);
        settle(started[0], kClosed);
    }
    EXPECT_EQ(order, (Seqs{1, 5, 2, 6, 3, 4}));
}

TEST_F(Dispatch, FewerSlotsAreInForceAtOnce) {
    limit(10);
    for (std::int64_t seq = 1; seq <= 10; ++seq)
        claim({.seq = seq, .aggregate = std::to_string(seq)});
    EXPECT_EQ(start().size(), 5U);
    limit(2);
    EXPECT_EQ(start(), Seqs{});
    for (const std::int64_t seq : {1, 2, 3, 4})
        settle(seq, kClosed);
    EXPECT_EQ(start(), Seqs{});
    settle(5, kClosed);
    EXPECT_EQ(start(), Seqs{6});
}

// --- shares of the rows ---

TEST_F(Dispatch, LaneAloneGetsHalfOfTheRows) {
    limit(1, 100);
    EXPECT_EQ(dispatcher.row_room("order"), 50U);
    std::int64_t seq = 0;
    while (claim({.seq = ++seq, .aggregate = std::to_string(seq)}) == Admission::queued)
        ASSERT_LT(seq, 100);
    EXPECT_EQ(seq, 51);
    EXPECT_EQ(dispatcher.row_room("order"), 0U);
    EXPECT_EQ(dispatcher.row_room("customer"), 25U);
}

TEST_F(Dispatch, EventsInFlightTakeNoRows) {
    limit(100, 10);
    for (std::int64_t seq = 1; seq <= 5; ++seq)
        claim({.seq = seq, .aggregate = std::to_string(seq)});
    EXPECT_EQ(dispatcher.row_room("order"), 0U);
    EXPECT_EQ(start().size(), 5U);
    EXPECT_EQ(dispatcher.row_room("order"), 5U);
    dispatcher.answered(id_of(1)); // to be recorded: counts again
    EXPECT_EQ(dispatcher.row_room("order"), 4U);
}

TEST_F(Dispatch, SmallestLimitsStillMove) {
    limit(1, 1, 1);
    for (std::int64_t seq = 1; seq <= 5; ++seq) {
        EXPECT_EQ(claim({.seq = seq, .bytes = 10}), Admission::queued) << seq;
        dispatcher.claim_ended();
        EXPECT_EQ(start(), Seqs{seq});
        settle(seq, kClosed);
    }
    expect_empty();
}

TEST_F(Dispatch, ManyLanesNeverExceedTheRows) {
    limit(10, 40);
    for (std::int64_t seq = 1; seq <= 500; ++seq)
        claim({.seq = seq, .aggregate = std::to_string(seq), .lane = std::to_string(seq % 100)});
    EXPECT_LE(dispatcher.queued(), 40U);
    EXPECT_GT(dispatcher.queued(), 30U);
}

// --- shares of the memory ---

TEST_F(Dispatch, LaneAloneGetsHalfOfTheMemory) {
    limit(100, 1000, 1000);
    std::int64_t seq = 0;
    while (claim({.seq = ++seq, .aggregate = std::to_string(seq), .bytes = 100}) ==
           Admission::queued)
        ASSERT_LT(seq, 100);
    EXPECT_EQ(dispatcher.held_bytes(), 500U);
}

TEST_F(Dispatch, BytesCountUntilTheResultIsRecorded) {
    claim({.seq = 1, .bytes = 100});
    const Event* event = dispatcher.next();
    ASSERT_NE(event, nullptr);
    EXPECT_EQ(event->payload.size(), 100U);
    dispatcher.release_payload(id_of(1));
    EXPECT_TRUE(event->payload.empty());
    EXPECT_EQ(dispatcher.held_bytes(), 100U);
    dispatcher.answered(id_of(1));
    EXPECT_EQ(dispatcher.held_bytes(), 100U);
    dispatcher.settled(id_of(1), kClosed);
    EXPECT_EQ(dispatcher.held_bytes(), 0U);
}

TEST_F(Dispatch, EventLargerThanAllMemoryGoesAlone) {
    limit(10, 100, 100);
    claim({.seq = 1, .aggregate = "1"});
    dispatcher.claim_ended();
    start();
    EXPECT_EQ(claim({.seq = 2, .aggregate = "2", .bytes = 5000}), Admission::full);
    dispatcher.claim_ended();
    settle(1, kClosed);
    EXPECT_EQ(claim({.seq = 2, .aggregate = "2", .bytes = 5000}), Admission::queued);
    EXPECT_EQ(claim({.seq = 3, .aggregate = "3"}), Admission::full);
    dispatcher.claim_ended();
    EXPECT_EQ(start(), Seqs{2});
    settle(2, kClosed);
    EXPECT_EQ(claim({.seq = 3, .aggregate = "3"}), Admission::queued);
}

// One claim after the other, each offering the large event and one of the small ones of `lane`; the
// small one of the claim before is answered after it. How many claims the large one took.
class LargeEvent : public Dispatch {
  protected:
    void SetUp() override { limit(10, 100, 100); }

    int claims_until_large(const std::string& lane, bool small_first) {
        std::int64_t seq = 10;
        const Row large{.seq = 1, .aggregate = "large", .lane = "bulk", .bytes = 500};
        claim({.seq = seq, .aggregate = "small", .lane = lane, .bytes = 10});
        dispatcher.claim_ended();
        for (int claims = 1; claims <= 100; ++claims) {
            const Seqs under_way = start();
            const std::int64_t next = seq + 1;
            const auto small = [&] {
                const Row row{
                    .seq = next, .aggregate = std::to_string(next), .lane = lane, .bytes = 10};
                if (dispatcher.row_room(lane) > 0 && claim(row) == Admission::queued)
                    seq = next;
            };
            if (small_first)
                small();
            if (dispatcher.row_room(large.lane) > 0 &&
                claim(large, Source::due) == Admission::queued)
                return claims;
            if (!small_first)
                small();
            dispatcher.claim_ended();
            for (const std::int64_t done : under_way)
                settle(done, kClosed);
        }
        return 100;
    }
};

TEST_F(LargeEvent, IsNotStarvedByAnotherLane) {
    EXPECT_LT(claims_until_large("order", false), 10);
}

TEST_F(LargeEvent, IsNotStarvedByAnotherLaneReadFirst) {
    EXPECT_LT(claims_until_large("order", true), 10);
}

TEST_F(LargeEvent, IsNotStarvedBySmallOnesOfItsLane) {
    EXPECT_LT(claims_until_large("bulk", false), 10);
}

TEST_F(LargeEvent, IsNotStarvedBySmallOnesOfItsLaneReadFirst) {
    EXPECT_LT(claims_until_large("bulk", true), 10);
}

TEST_F(LargeEvent, ThatVanishedHoldsUpNobody) {
    claim({.seq = 1, .aggregate = "1"});
    EXPECT_EQ(claim({.seq = 2, .aggregate = "2", .lane = "bulk", .bytes = 500}), Admission::full);
    EXPECT_EQ(dispatcher.row_room("order"), 0U);
    EXPECT_GT(dispatcher.row_room("bulk"), 0U);
    dispatcher.claim_ended();
    EXPECT_EQ(dispatcher.row_room("order"), 0U); // still waited for
    dispatcher.claim_ended();                    // not met: discarded, or another worker's
    EXPECT_GT(dispatcher.row_room("order"), 0U);
    EXPECT_EQ(claim({.seq = 3, .aggregate = "3"}), Admission::queued);
}

TEST_F(LargeEvent, OfABusyLaneHoldsUpNoOther) {
    claim({.seq = 1, .aggregate = "1", .lane = "bulk", .bytes = 10});
    EXPECT_EQ(claim({.seq = 2, .aggregate = "2", .lane = "bulk", .bytes = 500}), Admission::full);
    dispatcher.claim_ended();
    EXPECT_EQ(claim({.seq = 3, .aggregate = "3"}), Admission::queued);
}

TEST_F(LargeEvent, TwoOfThemTakeTurns) {
    claim({.seq = 1, .aggregate = "1"});
    start();
    const Row one{.seq = 2, .aggregate = "2", .lane = "bulk", .bytes = 500};
    const Row other{.seq = 3, .aggregate = "3", .lane = "bulky", .bytes = 500};
    EXPECT_EQ(claim(one), Admission::full);
    EXPECT_EQ(claim(other), Admission::full);
    dispatcher.claim_ended();
    settle(1, kClosed);
    EXPECT_EQ(claim(one), Admission::queued);
    EXPECT_EQ(claim(other), Admission::full);
    dispatcher.claim_ended();
    EXPECT_EQ(start(), Seqs{2});
    settle(2, kClosed);
    EXPECT_EQ(claim(other), Admission::queued);
    dispatcher.claim_ended();
    EXPECT_EQ(start(), Seqs{3});
    settle(3, kClosed);
    EXPECT_EQ(claim({.seq = 4, .aggregate = "4"}), Admission::queued);
}

// --- no order ---

class Unordered : public Dispatch {
  protected:
    Unordered() { dispatcher.set_limits({.ordering = Ordering::none}); }
};

TEST_F(Unordered, AggregateGoesAtOnce) {
    for (const std::int64_t seq : {1, 2, 3})
        EXPECT_EQ(claim({.seq = seq}, Source::ready, 0), Admission::queued);
    EXPECT_EQ(start(), (Seqs{1, 2, 3}));
    for (const std::int64_t seq : {2, 1, 3})
        settle(seq, kClosed);
    expect_empty();
}

TEST_F(Unordered, NothingIsParked) {
    for (std::int64_t seq = 1; seq <= 40; ++seq)
        EXPECT_EQ(claim({.seq = seq}), Admission::queued);
    EXPECT_EQ(dispatcher.next()->seq, 1);
    settle(1, kWaiting);
    EXPECT_EQ(parking(), Seqs{});
    EXPECT_EQ(dispatcher.next()->seq, 2);
}

TEST_F(Unordered, ChangedRowIsReadAgainAlone) {
    claim({.seq = 5});
    claim({.seq = 6});
    EXPECT_EQ(start(), (Seqs{5, 6}));
    settle(5, kChanged);
    const auto rereads = dispatcher.take_rereads();
    ASSERT_EQ(rereads.size(), 1U);
    EXPECT_EQ(rereads[0].range, (SeqRange{4, 5}));
    EXPECT_EQ(dispatcher.held_events(), 1U);
}

// A lane's events come and go, one claim after the other.
TEST_F(Unordered, LaneThatEmptiesAndFillsIsListedOnce) {
    std::int64_t seq = 0;
    for (int round = 0; round < 20; ++round) {
        for (int i = 0; i < 3; ++i)
            claim({.seq = ++seq});
        EXPECT_EQ(start(), (Seqs{seq - 2, seq - 1, seq}));
        for (std::int64_t done = seq - 2; done <= seq; ++done)
            settle(done, kClosed);
        expect_empty();
    }
}

TEST_F(Unordered, LanesTakeTurns) {
    dispatcher.set_limits({.max_in_flight = 1, .ordering = Ordering::none});
    for (const std::int64_t seq : {1, 2, 3, 4})
        claim({.seq = seq, .lane = "big"});
    for (const std::int64_t seq : {11, 12})
        claim({.seq = seq, .lane = "small"});
    Seqs order;
    for (int i = 0; i < 6; ++i) {
        const Seqs started = start();
        ASSERT_EQ(started.size(), 1U);
        order.push_back(started[0]);
        settle(started[0], kClosed);
    }
    EXPECT_EQ(order, (Seqs{1, 11, 2, 12, 3, 4}));
}

TEST_F(Unordered, RowsParkedBeforeAreFound) {
    dispatcher.orphaned("order", "a");
    EXPECT_EQ(followers(), std::vector<std::string>{"order/a"});
    EXPECT_EQ(claim({.seq = 1}, Source::parked), Admission::queued);
    EXPECT_EQ(claim({.seq = 2}, Source::parked), Admission::queued);
    dispatcher.followers_read_all(kA);
    EXPECT_EQ(start(), (Seqs{1, 2}));
}

TEST_F(Unordered, OrderComesBackWhenAllUnderWayIsDone) {
    for (const std::int64_t seq : {1, 2, 3})
        claim({.seq = seq});
    EXPECT_EQ(dispatcher.next()->seq, 1);
    EXPECT_EQ(dispatcher.next()->seq, 2);
    dispatcher.set_limits({.ordering = Ordering::aggregate});
    settle(1, kClosed);
    EXPECT_EQ(start(), Seqs{});
    settle(2, kClosed);
    EXPECT_EQ(start(), Seqs{3});
}

} // namespace
} // namespace outbox::core
