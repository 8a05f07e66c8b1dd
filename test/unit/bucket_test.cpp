// Accidents with buckets: trigger and worker of different library versions that disagree, a worker
// that has all the work, two aggregates taken for one.
#include "core/bucket.hpp"

#include <gtest/gtest.h>

#include <algorithm>

namespace outbox::core {
namespace {

using namespace std::string_literals;
using namespace std::string_view_literals;

// Computed apart from the code, by its definition. These values never change: a running worker and
// a newer trigger have to agree.
TEST(Bucket, HashNeverChanges) {
    EXPECT_EQ(fnv1a(""), 0xcbf29ce484222325U);
    EXPECT_EQ(fnv1a("a"), 0xaf63dc4c8601ec8cU);
    EXPECT_EQ(fnv1a("foobar"), 0x85944171f73967e8U);
    EXPECT_EQ(kBuckets, 64U);
}

TEST(Bucket, BucketsAndTagsNeverChange) {
    struct Case {
        std::string type;
        std::string id;
        unsigned bucket;
        std::uint32_t tag;
    };
    for (const auto& [type, id, bucket, tag] : {
             Case{"order", "1", 43, 0xea4e2485U},
             Case{"order", "2", 4, 0xea4e2485U},
             Case{"order", "42", 21, 0xea4e2485U},
             Case{"customer", "42", 9, 0x9393314cU},
             Case{"payment", "9b2f6c1e-8a43-4b57-9d3e-0c5f1a7be201", 11, 0x43bdf6f8U},
             Case{"", "", 18, 0x4fd0bfc1U},
             Case{"a", "b", 1, 0x296230c0U},
             Case{"Gr\u00fc\u00dfe", "\u20ac", 31, 0xc3c39ea9U}, // bytes above 0x7f are unsigned
             Case{std::string(100, 'x'), std::string(100, 'y'), 47, 0xe96d8e49U},
         }) {
        EXPECT_EQ(bucket_of(type, id), bucket) << type << '/' << id;
        EXPECT_EQ(lane_tag(type), tag) << type;
    }
}

TEST(Bucket, BitsCoverAllBucketsOnce) {
    BucketMask all = 0;
    for (unsigned bucket = 0; bucket < kBuckets; ++bucket) {
        EXPECT_EQ(all & bucket_bit(bucket), 0U);
        all |= bucket_bit(bucket);
    }
    EXPECT_EQ(all, kAllBuckets);
}

// No bucket is off the mean by more than a fifth, with a thousand ids a bucket.
void expect_even(std::string_view what, std::string (*id)(int)) {
    constexpr int kEach = 1000;
    std::array<int, kBuckets> counts{};
    for (int i = 0; i < kEach * static_cast<int>(kBuckets); ++i)
        ++counts.at(bucket_of("order", id(i)));
    const auto [least, most] = std::ranges::minmax(counts);
    EXPECT_GT(least, kEach * 8 / 10) << what;
    EXPECT_LT(most, kEach * 12 / 10) << what;
}

std::string uuid_text(std::uint64_t high, std::uint64_t low) {
    Uuid id;
    for (std::size_t i = 0; i < 8; ++i) {
        id.bytes.at(i) = static_cast<std::uint8_t>(high >> (56 - 8 * i));
        id.bytes.at(i + 8) = static_cast<std::uint8_t>(low >> (56 - 8 * i));
    }
    return id.text();
}

TEST(Bucket, UsualIdsSpreadEvenly) {
    expect_even("numbers", [](int i) { return std::to_string(i); });
    expect_even("thousands", [](int i) { return std::to_string(i * 1000); });
    expect_even("padded", [](int i) {
        const std::string number = std::to_string(i);
        return std::string(10 - number.size(), '0') + number;
    });
    expect_even("prefixed", [](int i) { return "ord_" + std::to_string(i); });
    expect_even("suffixed", [](int i) { return std::to_string(i) + "-eu-central-1"; });
    expect_even("random uuids", [](int i) {
        const std::uint64_t mixed = (static_cast<std::uint64_t>(i) + 1) * 0x9e3779b97f4a7c15U;
        return uuid_text(mixed, mixed * mixed);
    });
    expect_even("time-ordered uuids", [](int i) {
        return uuid_text(0x0190'0000'0000'7000U + (static_cast<std::uint64_t>(i) << 16U),
                         0x8000'0000'0000'0000U);
    });
}

// With any number of workers, each gets its share of few aggregates, too.
TEST(Bucket, FewAggregatesKeepFourWorkersBusy) {
    std::array<int, 4> counts{};
    for (int i = 1; i <= 200; ++i)
        ++counts.at(bucket_of("order", std::to_string(i)) % 4);
    EXPECT_GT(*std::ranges::min_element(counts), 30);
}

TEST(Bucket, TypeAndIdAreKeptApart) {
    EXPECT_NE(bucket_of("a", "bc"), bucket_of("ab", "c"));
    EXPECT_NE(bucket_of("", "abc"), bucket_of("abc", ""));
    int same = 0;
    for (int i = 0; i < 6400; ++i) {
        const std::string id = std::to_string(i);
        same += bucket_of("order", id) == bucket_of("customer", id) ? 1 : 0;
    }
    EXPECT_GT(same, 50); // about one in 64
    EXPECT_LT(same, 160);
}

} // namespace
} // namespace outbox::core
