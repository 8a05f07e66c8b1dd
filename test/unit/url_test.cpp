// Accidents with endpoints: an event that leaves its path, a secret in a message, a typo that only
// shows when the first event fails.
#include "core/url.hpp"

#include <gtest/gtest.h>

namespace outbox::core {
namespace {

using namespace std::string_literals;

std::string refusal(std::string_view text) {
    std::string error;
    EXPECT_FALSE(Endpoint::parse(text, error)) << text;
    EXPECT_TRUE(error.starts_with("must ")) << error;
    return error;
}

Endpoint accepted(std::string_view text) {
    std::string error;
    const std::optional<Endpoint> endpoint = Endpoint::parse(text, error);
    EXPECT_TRUE(endpoint) << text << ' ' << error;
    return endpoint.value_or(Endpoint{});
}

Event event_of(std::string type, std::string id, std::string event_type = "order.created") {
    Event event;
    event.aggregate_type = std::move(type);
    event.aggregate_id = std::move(id);
    event.event_type = std::move(event_type);
    return event;
}

// Empty when the URL cannot be built.
std::string expanded(std::string_view text, const Event& event) {
    std::string error;
    const std::optional<std::string> url = accepted(text).expand(event, error);
    EXPECT_NE(url.has_value(), !error.empty());
    return url.value_or("");
}

std::string with_id(std::string_view text, std::string id) {
    return expanded(text, event_of("order", std::move(id)));
}

// ---------------------------------------------------------------------------------------------

TEST(Endpoint, UsualUrlsPassUnchanged) {
    for (const char* url :
         {"http://h", "https://h/", "http://h:8080/in", "http://h:0/", "http://h:65535",
          "http://127.0.0.1/a/b?c=d&e", "http://[::1]:8080/x", "https://[2001:db8::7.8.9.10]/",
          "http://user:p%40ss@h/x", "http://user@h", "https://a-b.example.com./", "http://my_svc/x",
          "http://h?x=1", "http://h/a//b/../c/./%2F%2e", "HTTPS://H/x", "http://h/?", "http://h/|"})
        EXPECT_EQ(expanded(url, event_of("order", "1")), url);
}

TEST(Endpoint, OtherSchemesAreRefused) {
    for (const char* url : {"", "h", "//h/x", "ftp://h/", "file:///etc/passwd", "http:/h", "http:h",
                            "httpx://h", "https//h", "gopher://h", "javascript:x", "http:"})
        refusal(url);
}

TEST(Endpoint, HostMustBeNamed) {
    for (const char* url : {"http://",
                            "http:///x",
                            "http://?x",
                            "http://:80/",
                            "http://user@",
                            "http://user@/x",
                            "http://user:pass@:80/",
                            "http://a@b@c/",
                            "http://h;x/",
                            "http://h%2e/",
                            "http://a,b/",
                            "http://*/",
                            "http://[",
                            "http://[]/",
                            "http://[::1",
                            "http://::1/",
                            "http://[h]/",
                            "http://[:]/",
                            "http://[::1]x/",
                            "http://[::1%25eth0]/"})
        refusal(url);
}

TEST(Endpoint, PortMustBeANumberInRange) {
    for (const char* url : {"http://h:/", "http://h:65536", "http://h:99999999999999999999/",
                            "http://h:-1", "http://h:+1", "http://h:8a", "http://h:80:80/",
                            "http://[::1]:/x", "http://[::1]:x", "http://h:0x50"})
        refusal(url);
}

TEST(Endpoint, OddCharactersAreRefused) {
    for (const std::string& url :
         {"http://h/a b"s, " http://h/"s, "http://h/\n"s, "http://h/\r\nx"s, "http://h/\0"s,
          "http://h/\x7f"s, "http://h/\t"s, "http://h\\@evil/"s, "http://h/\\"s, "http://h/#f"s,
          "http://h#"s, "http://b\u00fccher/"s, "http://h/\u00fc"s, "http://h/?q=\u00fc"s})
        refusal(url);
}

TEST(Endpoint, StrayPercentSignsAreRefused) {
    for (const char* url : {"http://h/%", "http://h/%2", "http://h/%zz", "http://h/a%2gb",
                            "http://h/?q=100%", "http://u:%@h/", "http://h/%{aggregate_id}"})
        refusal(url);
}

TEST(Endpoint, OnlyKnownPlaceholdersInPathAndQuery) {
    for (const char* url :
         {"http://h/{}", "http://h/{", "http://h/}", "http://h/{id}", "http://h/{Aggregate_id}",
          "http://h/{aggregate_id", "http://h/aggregate_id}", "http://h/{{aggregate_id}}",
          "http://h/{ aggregate_id}", "http://h/?{payload}", "http://h/?a={event_type}}",
          "http://{aggregate_type}/", "http://h.{aggregate_type}/x", "http://h:{aggregate_id}/",
          "http://{event_type}@h/", "http://{aggregate_type}", "{event_type}://h/"})
        refusal(url);
}

TEST(Endpoint, TooLongIsRefused) {
    const std::string url = "http://h/";
    accepted(url + std::string(kMaxUrlBytes - url.size(), 'a'));
    refusal(url + std::string(kMaxUrlBytes - url.size() + 1, 'a'));
}

TEST(Endpoint, EndpointThatNoEventCouldUseIsRefusedAtOnce) {
    refusal("http://h/a%2F{aggregate_id}");
    refusal("http://h/{aggregate_id}%5cb");
    refusal("http://h/%252f{aggregate_id}");
    accepted("http://h/a%2Fb/{aggregate_id}");
    accepted("http://h/{aggregate_id}?x=%2F");
}

TEST(Endpoint, RefusalDoesNotRepeatASecret) {
    for (const char* url :
         {"http://user:hunter2@", "http://user:hunter2@h/{x}", "http://user:hunter2@h:x/",
          "ftp://user:hunter2@h", "http://h/?hunter2=%", "http://h/hunter2%2F{event_type}"})
        EXPECT_EQ(refusal(url).find("hunter2"), std::string::npos);
}

TEST(Endpoint, DisplayHidesUserinfoAndQuery) {
    const auto shown = [](std::string_view url) { return accepted(url).redacted(); };
    EXPECT_EQ(shown("https://user:hunter2@h:8/a/{aggregate_type}/{event_type}?key={aggregate_id}"),
              "https://***@h:8/a/{aggregate_type}/{event_type}?***");
    EXPECT_EQ(shown("http://h/a@b"), "http://h/a@b");
    EXPECT_EQ(shown("http://h?user@x"), "http://h?***");
    EXPECT_EQ(shown("http://user@h?x@y"), "http://***@h?***");
    EXPECT_EQ(shown("http://h"), "http://h");
}

// ---------------------------------------------------------------------------------------------

TEST(Expand, ValuesAreEncodedByteByByte) {
    EXPECT_EQ(expanded("http://h/{aggregate_type}/{aggregate_id}?t={event_type}",
                       event_of("order", "A-1._~", "a&b=c d#?/")),
              "http://h/order/A-1._~?t=a%26b%3Dc%20d%23%3F%2F");
    EXPECT_EQ(with_id("http://h/{aggregate_id}", "\u00fc?#%;@:&=+$,!'()*[]{}\"<>^`|"),
              "http://h/%C3%BC%3F%23%25%3B%40%3A%26%3D%2B%24%2C%21%27%28%29%2A%5B%5D%7B%7D%22%3C"
              "%3E%5E%60%7C");
}

TEST(Expand, ControlCharactersNeverGoRaw) {
    EXPECT_EQ(with_id("http://h/{aggregate_id}", "a\r\nb\0\x7f"s), "http://h/a%0D%0Ab%00%7F");
}

TEST(Expand, QueryWithoutPathIsFine) {
    EXPECT_EQ(expanded("http://h?x={event_type}", event_of("order", "1", "../a")),
              "http://h?x=..%2Fa");
}

TEST(Expand, LongestValueFits) {
    std::string id;
    std::string encoded;
    for (int i = 0; i < 100; ++i) {
        id += "\U0001F600";
        encoded += "%F0%9F%98%80";
    }
    EXPECT_EQ(with_id("http://h/{aggregate_id}", id), "http://h/" + encoded);
}

TEST(Expand, ValueCannotLeaveItsPath) {
    for (const char* id :
         {"",           ".",        "..",     "%2e", "%2E%2e", ".%2e",      "%2e.",
          "%252e%252e", "%25252e.", "%%32e.", "a/b", "/",      "../x",      "a%2fb",
          "%252F",      "a\\b",     "\\",     "%5C", "%255c",  "%25%35%63", "%2%46"}) {
        EXPECT_EQ(with_id("http://h/x/{aggregate_id}/y", id), "") << id;
        EXPECT_EQ(with_id("http://h/x-{aggregate_id}", id), "") << id;
        EXPECT_NE(with_id("http://h/x?y={aggregate_id}", id), "") << id;
    }
}

TEST(Expand, ValuesThatOnlyResembleDotSegmentsPass) {
    EXPECT_EQ(with_id("http://h/{aggregate_id}", "..."), "http://h/...");
    EXPECT_EQ(with_id("http://h/{aggregate_id}", "..a"), "http://h/..a");
    EXPECT_EQ(with_id("http://h/{aggregate_id}", "%"), "http://h/%25");
    EXPECT_EQ(with_id("http://h/{aggregate_id}", "%2"), "http://h/%252");
    EXPECT_EQ(with_id("http://h/{aggregate_id}", "100%zz"), "http://h/100%25zz");
}

TEST(Expand, ValueAndItsNeighboursCannotMakeADotSegment) {
    // Beside a literal: none of these values decodes to anything by itself.
    EXPECT_EQ(with_id("http://h/{aggregate_id}e", "%2"), "");
    EXPECT_EQ(with_id("http://h/.{aggregate_id}e", "%2"), "");
    EXPECT_EQ(with_id("http://h/%25{aggregate_id}", "2e"), "");
    EXPECT_EQ(with_id("http://h/%25{aggregate_id}", "2f"), "");
    EXPECT_EQ(with_id("http://h/{aggregate_id}f", "%2"), "");
    // Beside another value.
    constexpr std::string_view kPair = "http://h/a/{aggregate_type}{aggregate_id}?q";
    EXPECT_EQ(expanded(kPair, event_of("%", "2e")), "");
    EXPECT_EQ(expanded(kPair, event_of("%2", "F")), "");
    EXPECT_EQ(expanded(kPair, event_of("%25", "5c")), "");
    EXPECT_NE(expanded(kPair, event_of("%", "zz")), "");
    // The query is no part of the segment.
    EXPECT_EQ(with_id("http://h/{aggregate_id}?/..", "a"), "http://h/a?/..");
}

TEST(Expand, LiteralDotsStayTheOperatorsChoice) {
    EXPECT_EQ(with_id("http://h/../{aggregate_id}/.", "1"), "http://h/../1/.");
    EXPECT_EQ(with_id("http://h/.{aggregate_id}.", "1"), "http://h/.1.");
}

TEST(Expand, ReasonDoesNotRepeatTheValue) {
    for (const char* id : {"hunter2/x", "..", ""}) {
        std::string error;
        EXPECT_FALSE(accepted("http://h/{aggregate_id}").expand(event_of("order", id), error));
        EXPECT_FALSE(error.empty());
        EXPECT_EQ(error.find("hunter2"), std::string::npos);
        EXPECT_EQ(error.find(".."), std::string::npos);
    }
}

// ---------------------------------------------------------------------------------------------

std::string header_encoded(std::string_view value) {
    std::string out;
    append_header_encoded(out, value);
    return out;
}

TEST(HeaderEncoding, MatchesTheExampleOfCloudEvents) {
    EXPECT_EQ(header_encoded("Euro \u20ac \U0001F600"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
}

TEST(HeaderEncoding, OnlyPrintableAsciiStands) {
    for (int c = 0; c <= 0xff; ++c) {
        const std::string text(1, static_cast<char>(c));
        const bool stands = c >= 0x21 && c <= 0x7e && c != '"' && c != '%';
        EXPECT_EQ(header_encoded(text) == text, stands) << c;
    }
    EXPECT_EQ(header_encoded("\r\n\0\x7f\"%"s), "%0D%0A%00%7F%22%25");
}

TEST(HeaderEncoding, AppendsToWhatIsThere) {
    std::string out = "order/";
    append_header_encoded(out, "a b");
    append_percent_encoded(out, "/");
    EXPECT_EQ(out, "order/a%20b%2F");
}

TEST(Endpoint, SecretsAreKnownSoThatNoAnswerBringsThemBack) {
    std::string error;
    const auto secrets = [&error](std::string_view url) {
        return Endpoint::parse(url, error).value().secrets();
    };
    using List = std::vector<std::string>;
    EXPECT_EQ(secrets("http://h/p"), List{});
    EXPECT_EQ(secrets("https://user:passw0rd@h/p?key=k3y-value&x=1"),
              (List{"passw0rd", "k3y-value"}));
    EXPECT_EQ(secrets("https://token@h?{event_type}"), (List{"token", "{event_type}"}));
}

} // namespace
} // namespace outbox::core
