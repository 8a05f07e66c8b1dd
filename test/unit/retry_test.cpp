// Accidents with back-off: overflow, a delay of nothing, a retry that never comes.
#include "core/retry.hpp"

#include <gtest/gtest.h>

#include <array>
#include <limits>

namespace outbox::core {
namespace {

constexpr std::int32_t kIntMin = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t kIntMax = std::numeric_limits<std::int32_t>::max();
constexpr Micros kMicrosMin = std::numeric_limits<Micros>::min();
constexpr Micros kMicrosMax = std::numeric_limits<Micros>::max();
constexpr double kMiddle = 0.5; // scales by 1
constexpr double kAlmostOne = 0x1.fffffffffffffp-1;

TEST(Retry, DelayDoublesUpToTheCap) {
    const RetryPolicy policy{.base = kSecond, .cap = 10 * kSecond};
    EXPECT_EQ(back_off(policy, 1, kMiddle), 1 * kSecond);
    EXPECT_EQ(back_off(policy, 2, kMiddle), 2 * kSecond);
    EXPECT_EQ(back_off(policy, 3, kMiddle), 4 * kSecond);
    EXPECT_EQ(back_off(policy, 4, kMiddle), 8 * kSecond);
    EXPECT_EQ(back_off(policy, 5, kMiddle), 10 * kSecond);
    EXPECT_EQ(back_off(policy, 6, kMiddle), 10 * kSecond);
}

TEST(Retry, HugeAttemptCountDoesNotOverflow) {
    const RetryPolicy policy;
    for (const std::int32_t failures : {30, 31, 32, 33, 62, 63, 64, 65, 100000, kIntMax})
        EXPECT_EQ(back_off(policy, failures, kMiddle), policy.cap) << failures;
}

TEST(Retry, NonsenseAttemptCountIsTheFirstFailure) {
    const RetryPolicy policy;
    for (const std::int32_t failures : {1, 0, -1, -63, kIntMin})
        EXPECT_EQ(back_off(policy, failures, kMiddle), policy.base) << failures;
}

TEST(Retry, DelayJustBelowTheCapIsNotCutOff) {
    const RetryPolicy policy{.base = 1, .cap = Micros{1} << 62};
    EXPECT_EQ(back_off(policy, 62, kMiddle), Micros{1} << 61);
    EXPECT_EQ(back_off(policy, 63, kMiddle), Micros{1} << 62);
    EXPECT_EQ(back_off(policy, 64, kMiddle), Micros{1} << 62);
}

TEST(Retry, ExtremePoliciesStayPositive) {
    constexpr std::array kExtremes = {kMicrosMin,          Micros{-1},     Micros{0}, Micros{1},
                                      Micros{1'000'000'0}, kMicrosMax - 1, kMicrosMax};
    for (const Micros base : kExtremes)
        for (const Micros cap : kExtremes)
            for (const std::int32_t failures : {kIntMin, -1, 1, 2, 31, 63, 64, 100000, kIntMax})
                for (const double jitter : {0.0, kMiddle, kAlmostOne})
                    EXPECT_GE(back_off({.base = base, .cap = cap}, failures, jitter), 1)
                        << base << ' ' << cap << ' ' << failures << ' ' << jitter;
}

TEST(Retry, LongestDelayIsNotExceededByJitter) {
    const RetryPolicy policy{.base = kMicrosMax, .cap = kMicrosMax};
    EXPECT_EQ(back_off(policy, kIntMax, kAlmostOne), kMicrosMax);
}

TEST(Retry, CapBelowBaseCountsAsBase) {
    const RetryPolicy policy{.base = kSecond, .cap = kMillisecond};
    EXPECT_EQ(back_off(policy, 1, kMiddle), kSecond);
    EXPECT_EQ(back_off(policy, 20, kMiddle), kSecond);
}

TEST(Retry, JitterStaysWithinTwentyPercent) {
    const RetryPolicy policy{.base = kSecond, .cap = 1000 * kSecond};
    constexpr Micros kPlain = 16 * kSecond;
    EXPECT_EQ(back_off(policy, 5, 0.0), kPlain * 8 / 10);
    Micros last = 0;
    for (int step = 0; step < 1000; ++step) {
        const Micros delay = back_off(policy, 5, step / 1000.0);
        EXPECT_GE(delay, kPlain * 8 / 10);
        EXPECT_LE(delay, kPlain * 12 / 10);
        EXPECT_GT(delay, last);
        last = delay;
    }
    EXPECT_LE(back_off(policy, 5, kAlmostOne), kPlain * 12 / 10);
}

TEST(Retry, ReceiverCannotAskForThePastOrForEver) {
    EXPECT_EQ(cap_retry_after(kMicrosMin), 0);
    EXPECT_EQ(cap_retry_after(-1), 0);
    EXPECT_EQ(cap_retry_after(0), 0);
    EXPECT_EQ(cap_retry_after(30 * kSecond), 30 * kSecond);
    EXPECT_EQ(cap_retry_after(kHour), kHour);
    EXPECT_EQ(cap_retry_after(kHour + 1), kHour);
    EXPECT_EQ(cap_retry_after(kMicrosMax), kHour);
}

} // namespace
} // namespace outbox::core
