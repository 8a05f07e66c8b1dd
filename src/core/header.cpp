// The gate for header fields that somebody else wrote. Whatever passes cannot end a line, pose as a
// field of the relay or change how the request is framed.
#include "core/header.hpp"

#include <algorithm>
#include <array>
#include <span>

#include "core/ascii.hpp"

namespace outbox::core {

namespace {

// Set by the relay, or framing and hop-by-hop fields that only HTTP itself may set.
constexpr std::array<std::string_view, 12> kReservedNames = {
    "host",         "content-length", "transfer-encoding", "connection",
    "content-type", "expect",         "idempotency-key",   "te",
    "trailer",      "upgrade",        "keep-alive",        "proxy-connection",
};

constexpr std::array<std::string_view, 3> kReservedPrefixes = {"ce-", "webhook-", "outbox-"};

// Credentials: the operator's to set, never an event's.
constexpr std::array<std::string_view, 2> kOperatorNames = {"authorization", "proxy-authorization"};

constexpr bool is_token_character(char c) noexcept {
    constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
    return ascii::is_alnum(c) || kMarks.find(c) != std::string_view::npos;
}

bool is_token(std::string_view name) noexcept {
    return !name.empty() && std::all_of(name.begin(), name.end(), is_token_character);
}

bool is_one_of(std::string_view name, std::span<const std::string_view> names) noexcept {
    return std::any_of(names.begin(), names.end(), [name](std::string_view other) {
        return ascii::equal_ignoring_case(name, other);
    });
}

bool has_reserved_prefix(std::string_view name) noexcept {
    return std::any_of(
        kReservedPrefixes.begin(), kReservedPrefixes.end(),
        [name](std::string_view prefix) { return ascii::starts_with_ignoring_case(name, prefix); });
}

} // namespace

HeaderFault check_fixed_header(const Header& header) noexcept {
    if (!is_token(header.name))
        return HeaderFault::bad_name;
    if (is_one_of(header.name, kReservedNames) || has_reserved_prefix(header.name))
        return HeaderFault::reserved;
    if (std::any_of(header.value.begin(), header.value.end(), ascii::is_control))
        return HeaderFault::bad_value;
    return HeaderFault::none;
}

HeaderFault check_event_header(const Header& header) noexcept {
    if (is_one_of(header.name, kOperatorNames))
        return HeaderFault::reserved;
    return check_fixed_header(header);
}

std::string_view describe(HeaderFault fault) noexcept {
    switch (fault) {
    case HeaderFault::none:
        break;
    case HeaderFault::bad_name:
        return "a header name is not a token";
    case HeaderFault::bad_value:
        return "a header value holds a control character";
    case HeaderFault::reserved:
        return "a header name is reserved";
    }
    return {};
}

} // namespace outbox::core
