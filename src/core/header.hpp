// Which header fields may go on the wire (RFC 9110 5.1, 5.5): the operator's fixed ones and the
// event's own.
#pragma once

#include "core/types.hpp"

namespace outbox::core {

enum class HeaderFault : std::uint8_t {
    none,
    bad_name,  // not an RFC 9110 token
    bad_value, // a control character (HTAB included) or DEL
    reserved,  // a name that the relay or HTTP itself sets
};

// A header of an event's headers column. Reserved, in any case: host, content-length,
// transfer-encoding, connection, content-type, expect, authorization, idempotency-key, the
// hop-by-hop names te, trailer, upgrade, keep-alive, proxy-connection and proxy-authorization, and
// the prefixes ce-, webhook- and outbox-.
[[nodiscard]] HeaderFault check_event_header(const Header& header) noexcept;

// A fixed header from outbox.http_headers: the same, but authorization and proxy-authorization are
// the operator's to set.
[[nodiscard]] HeaderFault check_fixed_header(const Header& header) noexcept;

// A sentence fragment without name or value, e.g. "a header name is not a token".
[[nodiscard]] std::string_view describe(HeaderFault fault) noexcept;

} // namespace outbox::core
