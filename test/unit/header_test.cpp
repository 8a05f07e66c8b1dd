// Accidents with headers that table writers choose: a second header smuggled in, a forged id, a
// request whose frame is broken.
#include "core/header.hpp"

#include <gtest/gtest.h>

namespace outbox::core {
namespace {

using namespace std::string_literals;

HeaderFault event_fault(std::string name, std::string value = "v") {
    return check_event_header({std::move(name), std::move(value)});
}

HeaderFault fixed_fault(std::string name, std::string value = "v") {
    return check_fixed_header({std::move(name), std::move(value)});
}

TEST(Header, OrdinaryHeadersPass) {
    for (const char* name : {"traceparent", "tenant", "X-Api-Key", "x", "0", "!#$%&'*+-.^_`|~"}) {
        EXPECT_EQ(event_fault(name), HeaderFault::none) << name;
        EXPECT_EQ(fixed_fault(name), HeaderFault::none) << name;
    }
}

TEST(Header, ValueMayBeAnyTextWithoutControls) {
    for (const char* value : {"", " ", "a b", "a:b, \"c\" %0d%0a", "Gr\u00fc\u00dfe \U0001F600"})
        EXPECT_EQ(event_fault("tenant", value), HeaderFault::none) << value;
}

TEST(Header, LineEndsAndNulCannotInjectAHeader) {
    for (const std::string& value : {"a\r\nx: y"s, "a\nx: y"s, "a\rx"s, "a\0b"s, "\r\n"s, "a\n"s}) {
        EXPECT_EQ(event_fault("tenant", value), HeaderFault::bad_value);
        EXPECT_EQ(fixed_fault("tenant", value), HeaderFault::bad_value);
    }
    for (const std::string& name : {"a\r\nb"s, "a\n"s, "a\0"s, "a\0b"s})
        EXPECT_EQ(event_fault(name), HeaderFault::bad_name);
}

TEST(Header, NoControlCharacterPassesInAValue) {
    for (int c = 0; c <= 0xff; ++c) {
        const bool control = c < 0x20 || c == 0x7f;
        EXPECT_EQ(event_fault("tenant", "a"s + static_cast<char>(c)),
                  control ? HeaderFault::bad_value : HeaderFault::none)
            << c;
    }
}

TEST(Header, NameIsAToken) {
    EXPECT_EQ(event_fault(""), HeaderFault::bad_name);
    EXPECT_EQ(event_fault("t\u00e9nant"), HeaderFault::bad_name);
    for (const char c : "\t \"(),/:;<=>?@[\\]{}\x7f"s)
        EXPECT_EQ(event_fault("a"s + c), HeaderFault::bad_name) << c;
}

TEST(Header, ReservedNamesAreRefusedInAnyCase) {
    for (const char* name : {"host",
                             "Host",
                             "HOST",
                             "Content-Length",
                             "TRANSFER-ENCODING",
                             "cOnNeCtIoN",
                             "Content-Type",
                             "Expect",
                             "Idempotency-Key",
                             "TE",
                             "Trailer",
                             "Upgrade",
                             "Keep-Alive",
                             "Proxy-Connection",
                             "ce-id",
                             "CE-Specversion",
                             "Ce-",
                             "webhook-signature",
                             "Webhook-Id",
                             "outbox-replay",
                             "OUTBOX-EVENT-ID",
                             "outbox-"}) {
        EXPECT_EQ(event_fault(name), HeaderFault::reserved) << name;
        EXPECT_EQ(fixed_fault(name), HeaderFault::reserved) << name;
    }
}

TEST(Header, NamesThatOnlyResembleReservedOnesPass) {
    for (const char* name : {"hosts", "hos", "x-host", "tenant", "ce", "cent", "webhook", "outbox",
                             "my-ce-id", "content-type-options"})
        EXPECT_EQ(event_fault(name), HeaderFault::none) << name;
}

TEST(Header, CredentialsAreTheOperatorsAlone) {
    for (const char* name : {"Authorization", "AUTHORIZATION", "authorization",
                             "Proxy-Authorization", "proxy-authorization"}) {
        EXPECT_EQ(event_fault(name), HeaderFault::reserved) << name;
        EXPECT_EQ(fixed_fault(name), HeaderFault::none) << name;
    }
    EXPECT_EQ(fixed_fault("Authorization", "Bearer x\r\n"), HeaderFault::bad_value);
}

TEST(Header, EveryFaultHasWords) {
    EXPECT_TRUE(describe(HeaderFault::none).empty());
    for (const HeaderFault fault :
         {HeaderFault::bad_name, HeaderFault::bad_value, HeaderFault::reserved})
        EXPECT_FALSE(describe(fault).empty());
}

} // namespace
} // namespace outbox::core
