// The text and the hash of a UUID. Nothing here may know what an id stands for.
#include "core/types.hpp"

#include <functional>

namespace outbox::core {

namespace {

constexpr bool dash_before_byte(std::size_t i) noexcept {
    return i == 4 || i == 6 || i == 8 || i == 10;
}

} // namespace

std::string Uuid::text() const {
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string text;
    text.reserve(36);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (dash_before_byte(i))
            text += '-';
        text += kDigits[bytes[i] >> 4U];
        text += kDigits[bytes[i] & 0x0fU];
    }
    return text;
}

std::size_t UuidHash::operator()(const Uuid& id) const noexcept {
    // All bytes count: ids may be time-ordered or chosen by the writer.
    const auto* bytes = reinterpret_cast<const char*>(id.bytes.data());
    return std::hash<std::string_view>{}(std::string_view(bytes, id.bytes.size()));
}

} // namespace outbox::core
