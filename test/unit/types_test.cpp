// Accidents with event ids.
#include "core/types.hpp"

#include <gtest/gtest.h>

#include <unordered_set>

namespace outbox::core {
namespace {

TEST(Uuid, TextIsCanonicalAndLowerCase) {
    const Uuid id{{0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef, 0xfe, 0xdc, 0xba, 0x98, 0x76,
                   0x54, 0x32, 0x10}};
    EXPECT_EQ(id.text(), "01234567-89ab-cdef-fedc-ba9876543210");
    EXPECT_EQ(Uuid{}.text(), "00000000-0000-0000-0000-000000000000");
}

TEST(Uuid, OrderIsThatOfTheText) {
    Uuid low;
    Uuid high;
    low.bytes[0] = 0x7f;
    high.bytes[0] = 0x80; // negative, were the bytes signed
    EXPECT_LT(low, high);
    EXPECT_LT(low.text(), high.text());
}

TEST(Uuid, EveryByteOfAnIdCountsInTheHash) {
    std::unordered_set<std::size_t> hashes;
    for (std::size_t i = 0; i < Uuid{}.bytes.size(); ++i) {
        Uuid id;
        id.bytes[i] = 1;
        hashes.insert(UuidHash{}(id));
    }
    EXPECT_EQ(hashes.size(), Uuid{}.bytes.size());
}

} // namespace
} // namespace outbox::core
