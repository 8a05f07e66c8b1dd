// Character classes of ASCII, independent of any locale. Private to src/core.
#pragma once

#include <algorithm>
#include <string_view>

namespace outbox::core::ascii {

constexpr char lower(char c) noexcept {
    return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

constexpr bool is_digit(char c) noexcept {
    return c >= '0' && c <= '9';
}

constexpr bool is_alnum(char c) noexcept {
    return is_digit(c) || (lower(c) >= 'a' && lower(c) <= 'z');
}

constexpr bool is_hex_digit(char c) noexcept {
    return is_digit(c) || (lower(c) >= 'a' && lower(c) <= 'f');
}

constexpr bool is_control(char c) noexcept {
    return static_cast<unsigned char>(c) < 0x20 || c == '\x7f';
}

// Printable and no space: U+0021-U+007E.
constexpr bool is_graphic(char c) noexcept {
    return c > ' ' && c < '\x7f';
}

// Of a hexadecimal digit.
constexpr int hex_value(char c) noexcept {
    return is_digit(c) ? c - '0' : lower(c) - 'a' + 10;
}

constexpr bool equal_ignoring_case(std::string_view a, std::string_view b) noexcept {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](char x, char y) { return lower(x) == lower(y); });
}

constexpr bool starts_with_ignoring_case(std::string_view text, std::string_view prefix) noexcept {
    return equal_ignoring_case(text.substr(0, prefix.size()), prefix);
}

} // namespace outbox::core::ascii
