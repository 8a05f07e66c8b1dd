// The 64 fixed buckets that spread aggregates over a database's workers (DESIGN 2.1). Trigger and
// workers must agree, also across a library upgrade while running: the hash never changes.
#pragma once

#include "core/types.hpp"

namespace outbox::core {

constexpr unsigned kBuckets = 64;

// A set of buckets, bit b for bucket b.
using BucketMask = std::uint64_t;
constexpr BucketMask kAllBuckets = ~BucketMask{0};

constexpr BucketMask bucket_bit(unsigned bucket) noexcept {
    return BucketMask{1} << bucket;
}

// FNV-1a, 64 bits.
constexpr std::uint64_t fnv1a(std::string_view bytes,
                              std::uint64_t hash = 0xcbf29ce484222325U) noexcept {
    for (const char c : bytes) {
        hash ^= static_cast<unsigned char>(c);
        hash *= 0x100000001b3U;
    }
    return hash;
}

// Names a lane in the announcements of commits, where the name itself would be too long. Two lanes
// may share one: then both are looked at.
constexpr std::uint32_t lane_tag(std::string_view aggregate_type) noexcept {
    const std::uint64_t hash = fnv1a(aggregate_type);
    return static_cast<std::uint32_t>(hash ^ (hash >> 32U));
}

// The bucket of an aggregate. A NUL separates the two names, which cannot hold one.
constexpr unsigned bucket_of(std::string_view aggregate_type,
                             std::string_view aggregate_id) noexcept {
    std::uint64_t hash = fnv1a(aggregate_type);
    hash = fnv1a(std::string_view{"\0", 1}, hash);
    hash = fnv1a(aggregate_id, hash);
    hash ^= hash >> 32U; // the low bits of FNV alone mix badly
    hash ^= hash >> 16U;
    return static_cast<unsigned>((hash ^ (hash >> 8U)) % kBuckets);
}

} // namespace outbox::core
