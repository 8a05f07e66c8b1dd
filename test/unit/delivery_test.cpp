// Accidents with delivering: a result that says something else than the answer, an outage that uses
// up attempts, a result that is lost or recorded twice, an event that is sent with nowhere to go.
#include "net/delivery.hpp"

#include <gtest/gtest.h>

#include <curl/curl.h>

#include <cstring>
#include <limits>

#include "unit/scripted_server.hpp"

namespace outbox::net {
namespace {

using core::kHour;
using core::kMillisecond;
using core::kSecond;
using core::Micros;
using core::Settled;
using core::Source;
using std::chrono::milliseconds;
using test::answer;
using test::Received;
using test::Reply;
using test::ScriptedServer;
using test::Then;

using Seqs = std::vector<std::int64_t>;
using Clock = std::chrono::steady_clock;

constexpr Micros kNow = 1000 * kSecond; // the caller's clock, where it does not matter
constexpr std::int32_t kIntMax = std::numeric_limits<std::int32_t>::max();

core::Uuid id_of(std::int64_t seq) {
    core::Uuid id;
    std::memcpy(id.bytes.data(), &seq, sizeof(seq));
    return id;
}

core::Event event_of(std::int64_t seq, const std::string& aggregate = "1") {
    core::Event event;
    event.id = id_of(seq);
    event.seq = seq;
    event.aggregate_type = "order";
    event.aggregate_id = aggregate;
    event.event_type = "order.created";
    event.payload = "{\"n\": " + std::to_string(seq) + "}";
    return event;
}

class DeliveryTest : public testing::Test {
  protected:
    static void SetUpTestSuite() { curl_global_init(CURL_GLOBAL_DEFAULT); }
    static void TearDownTestSuite() { curl_global_cleanup(); }

    DeliveryTest() {
        config.engine.connect_timeout = 2 * kSecond;
        config.engine.request_timeout = 10 * kSecond;
        config.retry = {.base = 2 * kSecond, .cap = 100 * kSecond};
        config.max_attempts = 5;
        config.format = core::find_format("payload");
    }

    void send_to(const std::string& url) {
        std::string error;
        auto endpoint = core::Endpoint::parse(url, error);
        ASSERT_TRUE(endpoint) << error;
        config.target = core::Target{std::move(*endpoint), {}, "test"};
        if (delivery != nullptr) {
            delivery->configure(config);
        } else {
            create();
        }
    }

    void create(std::uint32_t seed = 1) {
        std::string error;
        delivery = Delivery::create(config, seed, error);
        ASSERT_NE(delivery, nullptr) << error;
        delivery->dispatcher().set_buckets(core::kAllBuckets);
    }

    void admit(core::Event event, Source source = Source::ready) {
        ASSERT_EQ(delivery->dispatcher().examine(event.id, event.aggregate_type, event.aggregate_id,
                                                 source, std::nullopt),
                  core::Admission::queued);
        delivery->dispatcher().admit(std::move(event), source);
    }

    // Starts what may start, and waits until nothing is under way.
    void drive(Micros now = kNow) {
        delivery->start(now);
        const auto deadline = Clock::now() + std::chrono::seconds{20};
        delivery->step(now);
        while (delivery->in_flight() > 0) {
            const long named = delivery->timeout_ms();
            pollfd fd{delivery->wait_fd(), POLLIN, 0};
            poll(&fd, 1, static_cast<int>(named < 0 ? 1000 : std::min(named, 1000L)));
            delivery->step(now);
            ASSERT_LT(Clock::now(), deadline);
        }
        delivery->step(now);
    }

    // Sends one event and takes its result, recorded as `how`.
    Result deliver(core::Event event, Settled how = Settled::closed, Micros now = kNow) {
        admit(std::move(event));
        drive(now);
        EXPECT_EQ(delivery->take_batch(10, now), 1U);
        Result result = delivery->batch(0);
        delivery->settle(0, how);
        delivery->batch_done();
        return result;
    }

    // The seqs of the next batch, all of it settled.
    Seqs record(std::size_t most = 100, Micros now = kNow) {
        Seqs seqs;
        const std::size_t size = delivery->take_batch(most, now);
        for (std::size_t i = 0; i < size; ++i) {
            seqs.push_back(delivery->batch(i).seq);
            delivery->settle(i, Settled::closed);
        }
        delivery->batch_done();
        return seqs;
    }

    DeliveryConfig config;
    std::unique_ptr<Delivery> delivery;
};

// --- what an answer becomes ---

TEST_F(DeliveryTest, SuccessIsDelivered) {
    ScriptedServer server([](const Received&) { return Reply{answer(202, "thanks")}; });
    send_to(server.url());
    core::Event event = event_of(7);
    event.attempts = 3;
    event.created_at = 123;
    event.replay = true;
    event.row = {.block = 4, .offset = 5, .retry_after = 6, .has_retry_after = true};
    const Result result = deliver(event);
    EXPECT_EQ(result.kind, ResultKind::delivered);
    EXPECT_EQ(result.id, id_of(7));
    EXPECT_EQ(result.seq, 7);
    EXPECT_EQ(result.aggregate_type, "order");
    EXPECT_EQ(result.aggregate_id, "1");
    EXPECT_EQ(result.event_type, "order.created");
    EXPECT_EQ(result.row.block, 4U);
    EXPECT_EQ(result.row.offset, 5U);
    EXPECT_EQ(result.row.retry_after, 6);
    EXPECT_TRUE(result.row.has_retry_after);
    EXPECT_TRUE(result.replay);
    EXPECT_EQ(result.attempts_before, 3);
    EXPECT_EQ(result.attempts, 3);
    EXPECT_EQ(result.created_at, 123);
    EXPECT_EQ(result.status, 202);
    EXPECT_EQ(result.error, "");
    EXPECT_EQ(result.deferrals, 0);
    ASSERT_EQ(server.requests().size(), 1U);
    EXPECT_EQ(server.requests()[0].body, "{\"n\": 7}");
    EXPECT_EQ(server.requests()[0].header("outbox-replay"), "true");
    EXPECT_EQ(delivery->dispatcher().held_events(), 0U);
    EXPECT_EQ(delivery->unrecorded(), 0U);
}

TEST_F(DeliveryTest, EventFailureIsCountedAndBacksOff) {
    ScriptedServer server([](const Received&) { return Reply{answer(500, "broken")}; });
    send_to(server.url());
    for (const std::int32_t attempts : {0, 1, 2, 3}) {
        core::Event event = event_of(10 + attempts);
        event.attempts = attempts;
        const Result result = deliver(event, Settled::waiting);
        EXPECT_EQ(result.kind, ResultKind::retry);
        EXPECT_EQ(result.attempts_before, attempts);
        EXPECT_EQ(result.attempts, attempts + 1);
        const Micros plain = (2 * kSecond) << attempts;
        EXPECT_GE(result.delay, plain * 8 / 10);
        EXPECT_LE(result.delay, plain * 12 / 10);
        EXPECT_EQ(result.status, 500);
        EXPECT_EQ(result.error, "status 500: broken");
    }
}

TEST_F(DeliveryTest, LastAttemptIsDeath) {
    ScriptedServer server([](const Received&) { return Reply{answer(422)}; });
    send_to(server.url());
    core::Event event = event_of(1);
    event.attempts = 4;
    const Result result = deliver(event);
    EXPECT_EQ(result.kind, ResultKind::dead);
    EXPECT_EQ(result.attempts, 5);
    EXPECT_EQ(result.error, "status 422");
    EXPECT_EQ(server.requests().size(), 1U);
}

TEST_F(DeliveryTest, AnswersCountAsTheContractSays) {
    struct Case {
        Reply reply;
        ResultKind kind;
        std::int32_t attempts;
    };
    for (const auto& [reply, kind, attempts] : {
             Case{{answer(200)}, ResultKind::delivered, 1},
             Case{{answer(204)}, ResultKind::delivered, 1},
             Case{{answer(301)}, ResultKind::retry, 2},
             Case{{answer(400)}, ResultKind::retry, 2},
             Case{{answer(500)}, ResultKind::retry, 2},
             Case{{answer(429)}, ResultKind::retry, 1},
             Case{{answer(502)}, ResultKind::retry, 1},
             Case{{answer(503)}, ResultKind::retry, 1},
             Case{{answer(504)}, ResultKind::retry, 1},
             Case{{"", Then::close}, ResultKind::retry, 2},
             Case{{answer(200, "cut").substr(0, 38), Then::close}, ResultKind::retry, 2},
             Case{{"nonsense", Then::close}, ResultKind::retry, 2},
         }) {
        ScriptedServer server([&reply = reply](const Received&) { return reply; });
        send_to(server.url());
        core::Event event = event_of(1);
        event.attempts = 1;
        const Result result = deliver(event);
        EXPECT_EQ(result.kind, kind) << reply.bytes;
        EXPECT_EQ(result.attempts, attempts) << reply.bytes;
        EXPECT_EQ(result.error.empty(), kind == ResultKind::delivered) << reply.bytes;
    }
}

TEST_F(DeliveryTest, OutageUsesUpNoAttempts) {
    send_to(test::refusing_url());
    Micros now = kNow;
    for (int i = 1; i <= 30; ++i) {
        core::Event event = event_of(i);
        event.attempts = 4; // one more counted failure would kill it
        const Result result = deliver(event, Settled::waiting, now);
        EXPECT_EQ(result.kind, ResultKind::retry);
        EXPECT_EQ(result.attempts, 4);
        EXPECT_EQ(result.status, 0);
        EXPECT_NE(result.error, "");
        now += result.delay;
    }
}

TEST_F(DeliveryTest, OutageBacksOffByLaneAndEndsWithASuccess) {
    std::atomic<bool> healthy = false;
    ScriptedServer server(
        [&healthy](const Received&) { return Reply{answer(healthy ? 200 : 503)}; });
    send_to(server.url());
    Micros now = kNow;
    std::int64_t seq = 0;
    const auto fail = [&](const std::string& lane) {
        ++seq;
        core::Event event = event_of(seq, std::to_string(seq));
        event.aggregate_type = lane;
        return deliver(event, Settled::waiting, now).delay;
    };
    for (const Micros seconds : {1, 2, 4, 8, 16, 32, 60, 60}) {
        const Micros delay = fail("order");
        EXPECT_GE(delay, seconds * kSecond * 8 / 10);
        EXPECT_LE(delay, seconds * kSecond * 12 / 10);
        now += delay;
    }
    EXPECT_LE(fail("customer"), kSecond * 12 / 10);
    healthy = true;
    EXPECT_EQ(deliver(event_of(++seq)).kind, ResultKind::delivered);
    healthy = false;
    EXPECT_LE(fail("order"), kSecond * 12 / 10);
}

TEST_F(DeliveryTest, RetryAfterIsHonouredUpToAnHour) {
    int status = 503;
    std::string value;
    ScriptedServer server([&](const Received&) {
        return Reply{answer(status, "", "Retry-After: " + value + "\r\n")};
    });
    send_to(server.url());
    std::int64_t seq = 0;
    for (const int code : {503, 429, 500}) {
        status = code;
        value = "100";
        EXPECT_EQ(deliver(event_of(++seq)).delay, 100 * kSecond) << code;
        value = "1000000";
        EXPECT_EQ(deliver(event_of(++seq)).delay, kHour) << code;
        value = "-1";
        EXPECT_GT(deliver(event_of(++seq)).delay, 0) << code;
    }
}

// --- what is not sent ---

TEST_F(DeliveryTest, EventBeyondTheLimitIsBuriedUnsent) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    send_to(server.url());
    for (const std::int32_t attempts : {5, 6, 100'000, kIntMax}) {
        core::Event event = event_of(attempts);
        event.attempts = attempts;
        const Result result = deliver(event);
        EXPECT_EQ(result.kind, ResultKind::dead);
        EXPECT_EQ(result.attempts_before, attempts);
        EXPECT_EQ(result.attempts, attempts);
        EXPECT_EQ(result.status, 0);
        EXPECT_NE(result.error.find("limit of 5"), std::string::npos) << result.error;
    }
    EXPECT_TRUE(server.requests().empty());
    EXPECT_EQ(delivery->failures_in_a_row(), 0U);
}

TEST_F(DeliveryTest, NegativeAttemptsAreNone) {
    ScriptedServer server([](const Received&) { return Reply{answer(500)}; });
    send_to(server.url());
    std::int64_t seq = 0;
    for (const std::int32_t attempts : {-1, -100, std::numeric_limits<std::int32_t>::min()}) {
        core::Event event = event_of(++seq);
        event.attempts = attempts;
        const Result result = deliver(event);
        EXPECT_EQ(result.kind, ResultKind::retry);
        EXPECT_EQ(result.attempts_before, attempts);
        EXPECT_EQ(result.attempts, 1);
        EXPECT_LE(result.delay, 2 * kSecond * 12 / 10);
    }
}

TEST_F(DeliveryTest, HighestLimitDoesNotOverflow) {
    config.max_attempts = kIntMax;
    ScriptedServer server([](const Received&) { return Reply{answer(500)}; });
    send_to(server.url());
    core::Event event = event_of(1);
    event.attempts = kIntMax - 1;
    const Result result = deliver(event);
    EXPECT_EQ(result.kind, ResultKind::dead);
    EXPECT_EQ(result.attempts, kIntMax);
}

TEST_F(DeliveryTest, UnbuildableEventIsDeadAtOnce) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    send_to(server.url("/in/{aggregate_id}"));
    core::Event bad_header = event_of(1);
    bad_header.headers = {{"x-ok", "evil\r\nsecret: value"}};
    core::Event reserved = event_of(2);
    reserved.headers = {{"Host", "secret"}};
    core::Event no_object = event_of(3);
    no_object.headers_error = "headers is not an object of strings";
    const core::Event bad_path = event_of(4, "../secret");
    for (const core::Event& event : {bad_header, reserved, no_object, bad_path}) {
        const Result result = deliver(event);
        EXPECT_EQ(result.kind, ResultKind::dead) << event.seq;
        EXPECT_EQ(result.attempts, 0) << event.seq;
        EXPECT_NE(result.error, "") << event.seq;
        EXPECT_EQ(result.error.find("secret"), std::string::npos) << result.error;
    }
    EXPECT_TRUE(server.requests().empty());
    EXPECT_EQ(delivery->failures_in_a_row(), 0U);
}

TEST_F(DeliveryTest, UnreadableEventIsACountedFailure) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    send_to(server.url());
    core::Event event = event_of(1);
    event.unreadable = "invalid memory\nalloc request size";
    event.attempts = 1;
    Result result = deliver(event, Settled::waiting);
    EXPECT_EQ(result.kind, ResultKind::retry);
    EXPECT_EQ(result.attempts, 2);
    EXPECT_GE(result.delay, 4 * kSecond * 8 / 10);
    EXPECT_EQ(result.error, "invalid memory alloc request size");
    for (const std::int32_t attempts : {4, 5, kIntMax}) {
        event.attempts = attempts;
        result = deliver(event);
        EXPECT_EQ(result.kind, ResultKind::dead) << attempts;
    }
    EXPECT_TRUE(server.requests().empty());
}

// The endpoint has nothing to do with it, and status must not say so.
TEST_F(DeliveryTest, UnreadableEventsAreNotTheEndpointsFailures) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    send_to(server.url());
    for (std::int64_t seq = 1; seq <= 6; ++seq) {
        core::Event event = event_of(seq);
        event.unreadable = "damaged";
        deliver(event);
    }
    EXPECT_EQ(delivery->failures_in_a_row(), 0U);
}

TEST_F(DeliveryTest, FailuresInARowEndWithASuccess) {
    int status = 500;
    ScriptedServer server([&status](const Received&) { return Reply{answer(status)}; });
    send_to(server.url());
    deliver(event_of(1));
    status = 503;
    deliver(event_of(2));
    EXPECT_EQ(delivery->failures_in_a_row(), 2U);
    status = 200;
    deliver(event_of(3));
    EXPECT_EQ(delivery->failures_in_a_row(), 0U);
}

// --- target and settings ---

TEST_F(DeliveryTest, WithoutATargetNothingStarts) {
    create();
    EXPECT_FALSE(delivery->has_target());
    core::Event buried = event_of(2, "2");
    buried.attempts = 100;
    core::Event unreadable = event_of(3, "3");
    unreadable.unreadable = "damaged";
    admit(event_of(1));
    admit(buried);
    admit(unreadable);
    drive();
    EXPECT_FALSE(delivery->has_results(kNow));
    EXPECT_EQ(delivery->dispatcher().queued(), 3U);
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    send_to(server.url());
    EXPECT_TRUE(delivery->has_target());
    drive();
    EXPECT_EQ(record().size(), 3U);
    EXPECT_EQ(server.requests().size(), 1U);
}

TEST_F(DeliveryTest, TargetTakenAwayLeavesWhatIsUnderWay) {
    ScriptedServer server([](const Received&) {
        return Reply{answer(200), Then::keep, milliseconds{100}};
    });
    send_to(server.url());
    admit(event_of(1));
    delivery->start(kNow);
    config.target.reset();
    delivery->configure(config);
    admit(event_of(2, "2"));
    drive();
    EXPECT_EQ(record(), Seqs{1});
    EXPECT_EQ(delivery->dispatcher().queued(), 1U);
}

TEST_F(DeliveryTest, NewEndpointAndFormatAreForLaterRequests) {
    ScriptedServer before([](const Received&) {
        return Reply{answer(200), Then::keep, milliseconds{200}};
    });
    ScriptedServer after([](const Received&) { return Reply{answer(200)}; });
    send_to(before.url());
    admit(event_of(1));
    delivery->start(kNow);
    config.format = core::find_format("json");
    send_to(after.url());
    admit(event_of(2, "2"));
    drive();
    EXPECT_EQ(record(), (Seqs{2, 1}));
    ASSERT_EQ(before.requests().size(), 1U);
    EXPECT_EQ(before.requests()[0].body, "{\"n\": 1}");
    ASSERT_EQ(after.requests().size(), 1U);
    EXPECT_NE(after.requests()[0].body.find("aggregate_type"), std::string::npos);
}

TEST_F(DeliveryTest, NewTimeoutIsForLaterRequests) {
    ScriptedServer server([](const Received&) {
        return Reply{answer(200), Then::keep, milliseconds{400}};
    });
    send_to(server.url());
    admit(event_of(1));
    delivery->start(kNow);
    config.engine.request_timeout = 100 * kMillisecond;
    delivery->configure(config);
    admit(event_of(2, "2"));
    drive();
    ASSERT_EQ(delivery->take_batch(10, kNow), 2U);
    EXPECT_EQ(delivery->batch(0).seq, 2);
    EXPECT_EQ(delivery->batch(0).kind, ResultKind::retry);
    EXPECT_EQ(delivery->batch(0).attempts, 1); // it was sent
    EXPECT_EQ(delivery->batch(1).seq, 1);
    EXPECT_EQ(delivery->batch(1).kind, ResultKind::delivered);
}

TEST_F(DeliveryTest, LimitsOfRequestsAreKept) {
    ScriptedServer server([](const Received&) {
        return Reply{answer(200), Then::keep, milliseconds{20}};
    });
    config.dispatch.max_in_flight = 8;
    send_to(server.url());
    for (std::int64_t seq = 1; seq <= 40; ++seq)
        admit(event_of(seq, std::to_string(seq)));
    for (int rounds = 0; delivery->dispatcher().held_events() > 0 && rounds < 100; ++rounds) {
        drive();
        record();
    }
    EXPECT_EQ(server.requests().size(), 40U);
    EXPECT_LE(server.most_at_once(), 4); // a lane alone: half of them
}

TEST_F(DeliveryTest, JitterDiffersBetweenWorkers) {
    send_to(test::refusing_url());
    std::vector<Micros> delays;
    for (const std::uint32_t seed : {1U, 2U, 3U, 1U}) {
        create(seed);
        delays.push_back(deliver(event_of(1)).delay);
    }
    EXPECT_FALSE(delays[0] == delays[1] && delays[1] == delays[2]);
    EXPECT_EQ(delays[0], delays[3]);
}

// --- recording ---

class Recording : public DeliveryTest {
  protected:
    // One event of each aggregate, answered and not yet recorded.
    void answered(std::int64_t count) {
        send_to(server.url());
        for (std::int64_t seq = 1; seq <= count; ++seq) {
            admit(event_of(seq, std::to_string(seq)));
            drive(); // one after the other: results come in order
        }
    }

    ScriptedServer server{[](const Received&) { return Reply{answer(200)}; }};
};

TEST_F(Recording, NothingToRecord) {
    create();
    EXPECT_FALSE(delivery->has_results(kNow));
    EXPECT_EQ(delivery->next_deferred(), std::nullopt);
    EXPECT_EQ(delivery->unrecorded(), 0U);
    EXPECT_EQ(delivery->take_batch(10, kNow), 0U);
    delivery->batch_done();
}

TEST_F(Recording, BatchesAreInOrderAndNoLargerThanAsked) {
    answered(5);
    EXPECT_TRUE(delivery->has_results(kNow));
    EXPECT_EQ(delivery->unrecorded(), 5U);
    EXPECT_EQ(record(2), (Seqs{1, 2}));
    EXPECT_EQ(record(2), (Seqs{3, 4}));
    EXPECT_EQ(delivery->unrecorded(), 1U);
    EXPECT_EQ(record(2), Seqs{5});
    EXPECT_FALSE(delivery->has_results(kNow));
    EXPECT_EQ(delivery->unrecorded(), 0U);
}

TEST_F(Recording, BatchCountsAsUnrecordedUntilItIsDone) {
    answered(3);
    EXPECT_EQ(delivery->take_batch(2, kNow), 2U);
    EXPECT_EQ(delivery->unrecorded(), 3U);
    delivery->settle(0, Settled::closed);
    delivery->settle(1, Settled::closed);
    delivery->batch_done();
    EXPECT_EQ(delivery->unrecorded(), 1U);
}

TEST_F(Recording, DeferredResultComesAgainWhenItIsTime) {
    answered(2);
    ASSERT_EQ(delivery->take_batch(10, kNow), 2U);
    delivery->batch(0).deferrals++;
    delivery->batch(0).row.block = 77; // the row moved
    delivery->defer(0, kNow + kSecond);
    delivery->settle(1, Settled::closed);
    delivery->batch_done();
    EXPECT_EQ(delivery->unrecorded(), 1U);
    EXPECT_FALSE(delivery->has_results(kNow + kSecond - 1));
    EXPECT_EQ(delivery->next_deferred(), kNow + kSecond);
    EXPECT_EQ(delivery->take_batch(10, kNow + kSecond - 1), 0U);
    EXPECT_TRUE(delivery->has_results(kNow + kSecond));
    ASSERT_EQ(delivery->take_batch(10, kNow + kSecond), 1U);
    EXPECT_EQ(delivery->batch(0).seq, 1);
    EXPECT_EQ(delivery->batch(0).deferrals, 1);
    EXPECT_EQ(delivery->batch(0).row.block, 77U);
    EXPECT_EQ(delivery->batch(0).kind, ResultKind::delivered);
    delivery->settle(0, Settled::closed);
    delivery->batch_done();
    EXPECT_EQ(delivery->next_deferred(), std::nullopt);
    EXPECT_EQ(delivery->dispatcher().held_events(), 0U);
}

TEST_F(Recording, DeferredResultsComeInTheOrderOfTheirTimes) {
    answered(5);
    ASSERT_EQ(delivery->take_batch(4, kNow), 4U);
    delivery->defer(0, kNow + 3 * kSecond);
    delivery->defer(1, kNow + kSecond);
    delivery->defer(2, kNow + 2 * kSecond);
    delivery->defer(3, kNow + kSecond);
    delivery->batch_done();
    EXPECT_EQ(delivery->next_deferred(), kNow + kSecond);
    EXPECT_EQ(record(100, kNow + 2 * kSecond), (Seqs{2, 4, 3, 5}));
    EXPECT_EQ(record(100, kNow + 3 * kSecond), Seqs{1});
}

TEST_F(Recording, ResultThatCannotBeRecordedHoldsUpItsAggregateOnly) {
    send_to(server.url());
    admit(event_of(1, "bad"));
    admit(event_of(2, "bad"));
    admit(event_of(3, "good"));
    admit(event_of(4, "good"));
    for (int round = 0; round < 3; ++round) {
        drive();
        const std::size_t size = delivery->take_batch(10, kNow);
        for (std::size_t i = 0; i < size; ++i) {
            if (delivery->batch(i).aggregate_id == "bad")
                delivery->defer(i, kNow + kHour);
            else
                delivery->settle(i, Settled::closed);
        }
        delivery->batch_done();
    }
    EXPECT_EQ(server.requests().size(), 3U); // 1, 3 and 4
    EXPECT_EQ(record(10, kNow + kHour), Seqs{1});
    drive();
    EXPECT_EQ(record(), Seqs{2});
    EXPECT_EQ(server.requests().size(), 4U);
}

TEST_F(Recording, NextOfItsAggregateStartsWhenTheResultIsRecorded) {
    send_to(server.url());
    admit(event_of(1));
    admit(event_of(2));
    drive();
    drive();
    EXPECT_EQ(server.requests().size(), 1U);
    EXPECT_EQ(record(), Seqs{1});
    drive();
    EXPECT_EQ(record(), Seqs{2});
}

TEST_F(Recording, UnsentResultsFreeTheirAggregateToo) {
    send_to(server.url());
    core::Event buried = event_of(1);
    buried.attempts = 100;
    core::Event unbuildable = event_of(2);
    unbuildable.headers_error = "no";
    core::Event unreadable = event_of(3);
    unreadable.unreadable = "damaged";
    for (const core::Event& event : {buried, unbuildable, unreadable, event_of(4)})
        admit(event);
    for (std::int64_t seq = 1; seq <= 4; ++seq) {
        drive();
        EXPECT_EQ(delivery->in_flight(), 0U);
        EXPECT_EQ(record(), Seqs{seq});
    }
    EXPECT_EQ(server.requests().size(), 1U);
    EXPECT_EQ(delivery->dispatcher().held_events(), 0U);
}

TEST_F(Recording, FailedHeadSendsItsFollowersToTheTable) {
    ScriptedServer failing([](const Received&) { return Reply{answer(500)}; });
    send_to(failing.url());
    admit(event_of(1));
    admit(event_of(2));
    drive();
    ASSERT_EQ(delivery->take_batch(10, kNow), 1U);
    delivery->settle(0, Settled::waiting);
    delivery->batch_done();
    EXPECT_EQ(delivery->dispatcher().take_parking().size(), 1U);
    drive();
    EXPECT_EQ(failing.requests().size(), 1U);
}

TEST_F(Recording, PayloadIsNotHeldTwice) {
    send_to(server.url());
    core::Event event = event_of(1);
    event.payload.assign(1'000'000, '1');
    admit(event);
    delivery->start(kNow);
    EXPECT_EQ(delivery->dispatcher().held_bytes(), 1'000'000U); // it counts all the same
    drive();
    record();
    EXPECT_EQ(delivery->dispatcher().held_bytes(), 0U);
    ASSERT_EQ(server.requests().size(), 1U);
    EXPECT_EQ(server.requests()[0].body, event.payload);
}

TEST_F(Recording, EndWithRequestsUnderWayIsNoAccident) {
    ScriptedServer silent([](const Received&) {
        return Reply{"", Then::keep, milliseconds{10'000}};
    });
    send_to(silent.url());
    for (std::int64_t seq = 1; seq <= 10; ++seq)
        admit(event_of(seq, std::to_string(seq)));
    delivery->start(kNow);
    delivery->step(kNow);
    EXPECT_EQ(delivery->in_flight(), 10U);
    delivery.reset();
}

} // namespace
} // namespace outbox::net
