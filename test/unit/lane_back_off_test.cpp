// Accidents with a failing endpoint: a wave of failures that sends the lane away for a minute, an
// outage that is hammered, a lane that stays slow after it healed.
#include "core/lane_back_off.hpp"

#include <gtest/gtest.h>

namespace outbox::core {
namespace {

constexpr double kMiddle = 0.5; // scales by 1
constexpr Micros kStart = 1000 * kSecond;

TEST(LaneBackOff, LongOutageDoublesToAMinute) {
    LaneBackOff lanes;
    Micros now = kStart;
    for (const Micros seconds : {1, 2, 4, 8, 16, 32, 60, 60, 60}) {
        const Micros wait = lanes.failed("order", now, kMiddle);
        EXPECT_EQ(wait, seconds * kSecond);
        now += wait;
    }
    for (int i = 0; i < 1000; ++i)
        now += lanes.failed("order", now, kMiddle);
    EXPECT_EQ(lanes.failed("order", now, kMiddle), 60 * kSecond);
}

TEST(LaneBackOff, WaveOfFailuresIsOneStep) {
    LaneBackOff lanes;
    for (int i = 0; i < 128; ++i)
        EXPECT_EQ(lanes.failed("order", kStart + i * kMillisecond, kMiddle), kSecond);
    // The same requests, a second later.
    for (int i = 0; i < 128; ++i)
        EXPECT_EQ(lanes.failed("order", kStart + kSecond + i * kMillisecond, kMiddle), 2 * kSecond);
    EXPECT_EQ(lanes.failed("order", kStart + 3 * kSecond, kMiddle), 4 * kSecond);
}

TEST(LaneBackOff, JitterSpreadsAWave) {
    LaneBackOff lanes;
    const Micros shortest = lanes.failed("order", kStart, 0.0);
    const Micros longest = lanes.failed("order", kStart, 0.999);
    EXPECT_EQ(shortest, kSecond * 8 / 10);
    EXPECT_GT(longest, kSecond * 119 / 100);
    EXPECT_LE(longest, kSecond * 12 / 10);
}

TEST(LaneBackOff, SuccessEndsIt) {
    LaneBackOff lanes;
    Micros now = kStart;
    for (int i = 0; i < 5; ++i)
        now += lanes.failed("order", now, kMiddle);
    EXPECT_EQ(lanes.failing(), 1U);
    lanes.succeeded("order");
    EXPECT_EQ(lanes.failing(), 0U);
    EXPECT_EQ(lanes.failed("order", now, kMiddle), kSecond);
    lanes.succeeded("unknown");
}

TEST(LaneBackOff, LanesDoNotSlowEachOther) {
    LaneBackOff lanes;
    Micros now = kStart;
    for (int i = 0; i < 5; ++i)
        now += lanes.failed("order", now, kMiddle);
    EXPECT_EQ(lanes.failed("customer", now, kMiddle), kSecond);
    lanes.succeeded("customer");
    EXPECT_EQ(lanes.failed("order", now, kMiddle), 32 * kSecond);
}

TEST(LaneBackOff, LanesWithoutEndDoNotFillMemory) {
    LaneBackOff lanes;
    for (int i = 0; i < 50'000; ++i)
        EXPECT_EQ(lanes.failed("lane" + std::to_string(i), kStart, kMiddle), kSecond);
    EXPECT_LE(lanes.failing(), 10'000U);
}

} // namespace
} // namespace outbox::core
