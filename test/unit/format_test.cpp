// Accidents on the wire: a field missing or in the wrong place, a body that is no JSON, a header
// that a table writer smuggled in. The golden requests are what receivers rely on.
#include "core/format.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>

namespace outbox::core {
namespace {

using namespace std::string_literals;
using testing::Contains;
using testing::ElementsAre;
using testing::Not;

Event sample_event() {
    Event event;
    event.id.bytes = {0x01, 0x93, 0x7a, 0x1e, 0x00, 0x00, 0x70, 0x00,
                      0x80, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x2a};
    event.seq = 42;
    event.aggregate_type = "order";
    event.aggregate_id = "A 1";
    event.event_type = "order.created";
    event.payload = R"({"total": 9.90})";
    event.headers = {{"traceparent", "00-ab-cd-01"}, {"tenant", "\"z\u00fcrich\""}};
    event.created_at = 1'796'071'472'000'001;
    return event;
}

constexpr const char* kSampleId = "01937a1e-0000-7000-8000-00000000002a";

Target target_of(std::string_view url) {
    std::string error;
    const std::optional<Endpoint> endpoint = Endpoint::parse(url, error);
    EXPECT_TRUE(endpoint) << error;
    return {endpoint.value_or(Endpoint{}), {{"Authorization", "Bearer x"}}, "urn:outbox:1:shop"};
}

BuildResult build(std::string_view format, const Event& event,
                  std::string_view url = "http://h/in/{aggregate_type}") {
    const std::array<const Event*, 1> events = {&event};
    return find_format(format)->build(events, target_of(url));
}

std::string json_string(std::string_view text) {
    std::string out;
    append_json_string(out, text);
    return out;
}

constexpr std::array kFormats = {"cloudevents", "json", "payload"};

// ---------------------------------------------------------------------------------------------

TEST(Format, AnEventHeaderDoesNotOverrideTheOperators) {
    Event event = sample_event();
    event.headers = {{"x-api-key", "forged"}, {"tenant", "a"}};
    Target target = target_of("http://h/");
    target.fixed_headers = {{"X-Api-Key", "real"}};
    const std::array<const Event*, 1> events = {&event};
    for (const char* name : kFormats) {
        const BuildResult built = find_format(name)->build(events, target);
        ASSERT_TRUE(built.ok) << name;
        EXPECT_THAT(built.request.headers, Contains(Header{"X-Api-Key", "real"}));
        EXPECT_THAT(built.request.headers, Not(Contains(Header{"x-api-key", "forged"})));
        EXPECT_THAT(built.request.headers, Contains(Header{"tenant", "a"}));
    }
}

TEST(Format, UnknownNamesFindNothing) {
    for (const char* name : kFormats) {
        ASSERT_NE(find_format(name), nullptr) << name;
        EXPECT_EQ(find_format(name), find_format(name));
        EXPECT_EQ(find_format(name)->name(), name);
        EXPECT_EQ(find_format(name)->limits().max_events, 1U);
    }
    for (const char* name : {"", "JSON", "json ", "cloudevent", "xml"})
        EXPECT_EQ(find_format(name), nullptr) << name;
}

TEST(Format, EveryEventOfARequestGetsAVerdict) {
    Answer answer;
    answer.transport = Transport::complete;
    answer.status = 503;
    for (const char* name : kFormats) {
        const std::vector<Verdict> verdicts = find_format(name)->classify(answer, 3);
        ASSERT_EQ(verdicts.size(), 3U);
        for (const Verdict& verdict : verdicts) {
            EXPECT_EQ(verdict.outcome, Outcome::lane_failure);
            EXPECT_EQ(verdict.error, "status 503");
        }
    }
}

TEST(Format, GoldenCloudEvent) {
    const BuildResult result = build("cloudevents", sample_event());
    ASSERT_TRUE(result.ok) << result.error;
    EXPECT_EQ(result.request.url, "http://h/in/order");
    EXPECT_EQ(result.request.body, R"({"total": 9.90})");
    EXPECT_THAT(
        result.request.headers,
        ElementsAre(
            Header{"Content-Type", "application/json"}, Header{"Idempotency-Key", kSampleId},
            Header{"ce-specversion", "1.0"}, Header{"ce-id", kSampleId},
            Header{"ce-source", "urn:outbox:1:shop"}, Header{"ce-type", "order.created"},
            Header{"ce-subject", "order/A%201"}, Header{"ce-time", "2026-11-30T20:44:32.000001Z"},
            Header{"ce-partitionkey", "A%201"}, Header{"ce-sequence", "0000000000000000042"},
            Header{"Authorization", "Bearer x"}, Header{"traceparent", "00-ab-cd-01"},
            Header{"tenant", "\"z\u00fcrich\""}));
}

TEST(Format, GoldenJson) {
    const BuildResult result = build("json", sample_event());
    ASSERT_TRUE(result.ok) << result.error;
    EXPECT_EQ(result.request.url, "http://h/in/order");
    EXPECT_EQ(result.request.body,
              R"({"id":"01937a1e-0000-7000-8000-00000000002a","aggregate_type":"order",)"
              R"("aggregate_id":"A 1","event_type":"order.created","seq":42,)"
              R"("created_at":"2026-11-30T20:44:32.000001Z","payload":{"total": 9.90},)"
              "\"headers\":{\"traceparent\":\"00-ab-cd-01\",\"tenant\":\"\\\"z\u00fcrich\\\"\"}}");
    EXPECT_THAT(result.request.headers, ElementsAre(Header{"Content-Type", "application/json"},
                                                    Header{"Idempotency-Key", kSampleId},
                                                    Header{"Authorization", "Bearer x"},
                                                    Header{"traceparent", "00-ab-cd-01"},
                                                    Header{"tenant", "\"z\u00fcrich\""}));
}

TEST(Format, GoldenPayload) {
    const BuildResult result = build("payload", sample_event());
    ASSERT_TRUE(result.ok) << result.error;
    EXPECT_EQ(result.request.url, "http://h/in/order");
    EXPECT_EQ(result.request.body, R"({"total": 9.90})");
    EXPECT_THAT(
        result.request.headers,
        ElementsAre(
            Header{"Content-Type", "application/json"}, Header{"Idempotency-Key", kSampleId},
            Header{"outbox-event-id", kSampleId}, Header{"outbox-event-type", "order.created"},
            Header{"outbox-aggregate-type", "order"}, Header{"outbox-aggregate-id", "A%201"},
            Header{"outbox-sequence", "0000000000000000042"}, Header{"Authorization", "Bearer x"},
            Header{"traceparent", "00-ab-cd-01"}, Header{"tenant", "\"z\u00fcrich\""}));
}

TEST(Format, JsonSaysNullForWhatIsAbsent) {
    Event event = sample_event();
    event.created_at.reset();
    event.headers.clear();
    event.seq = -7;
    EXPECT_EQ(build("json", event).request.body,
              R"({"id":"01937a1e-0000-7000-8000-00000000002a","aggregate_type":"order",)"
              R"("aggregate_id":"A 1","event_type":"order.created","seq":-7,"created_at":null,)"
              R"("payload":{"total": 9.90},"headers":null})");
}

TEST(Format, TimeThatCannotBeExpressedIsLeftOut) {
    Event event = sample_event();
    event.created_at.reset();
    const BuildResult result = build("cloudevents", event);
    ASSERT_TRUE(result.ok);
    EXPECT_THAT(result.request.headers,
                Not(Contains(testing::Field(&Header::name, testing::StrEq("ce-time")))));
}

TEST(Format, OddPayloadsGoOutByteForByte) {
    for (const std::string& payload :
         {"null"s, "0"s, "\"\""s, "[]"s, "{}"s, "1e400"s, R"("\u0000 \\ \"")"s,
          "\"\U0001F600\u2028\""s, "\""s + std::string(3'000'000, 'x') + "\""}) {
        Event event = sample_event();
        event.payload = payload;
        EXPECT_TRUE(build("cloudevents", event).request.body == payload);
        EXPECT_TRUE(build("payload", event).request.body == payload);
        EXPECT_NE(
            build("json", event).request.body.find(",\"payload\":" + payload + ",\"headers\""),
            std::string::npos);
    }
}

TEST(Format, ControlCharactersInNamesNeverGoRaw) {
    Event event = sample_event();
    event.aggregate_type = event.aggregate_id = event.event_type = "a\r\nX: y\t\x01\x7f\u00e9\"%";
    for (const char* name : kFormats) {
        const BuildResult result = build(name, event);
        ASSERT_TRUE(result.ok) << name << result.error;
        std::string wire = result.request.url + result.request.body;
        for (const Header& header : result.request.headers)
            wire += header.name + header.value;
        for (const char c : wire)
            EXPECT_TRUE(static_cast<unsigned char>(c) >= 0x20 && c != 0x7f) << name;
    }
    EXPECT_THAT(build("cloudevents", event).request.headers,
                Contains(Header{"ce-type", "a%0D%0AX:%20y%09%01%7F%C3%A9%22%25"}));
    EXPECT_THAT(build("payload", event).request.headers,
                Contains(Header{"outbox-event-type", "a%0D%0AX:%20y%09%01%7F%C3%A9%22%25"}));
}

TEST(Format, ReplayIsMarkedInEveryFormat) {
    const Header mark{"outbox-replay", "true"};
    for (const char* name : kFormats) {
        Event event = sample_event();
        EXPECT_THAT(build(name, event).request.headers, Not(Contains(mark))) << name;
        event.replay = true;
        EXPECT_THAT(build(name, event).request.headers, Contains(mark)) << name;
    }
}

TEST(Format, BadEventHeadersCannotBeBuilt) {
    for (const Header& header :
         {Header{"tenant", "hunter2\r\nx: y"}, Header{"hunter2 x", "v"}, Header{"", "hunter2"},
          Header{"Ce-Id", "hunter2"}, Header{"IDEMPOTENCY-KEY", "hunter2"},
          Header{"Authorization", "hunter2"}, Header{"Outbox-Replay", "hunter2"}}) {
        for (const char* name : kFormats) {
            Event event = sample_event();
            event.headers.push_back(header);
            const BuildResult result = build(name, event);
            EXPECT_FALSE(result.ok) << name;
            EXPECT_FALSE(result.error.empty()) << name;
            EXPECT_EQ(result.error.find("hunter2"), std::string::npos) << name;
        }
    }
}

TEST(Format, HeadersThatAreNoObjectOfStringsCannotBeBuilt) {
    Event event = sample_event();
    event.headers.clear();
    event.headers_error = "headers is not an object of strings";
    for (const char* name : kFormats) {
        const BuildResult result = build(name, event);
        EXPECT_FALSE(result.ok) << name;
        EXPECT_EQ(result.error, event.headers_error) << name;
    }
}

TEST(Format, ValueThatDoesNotFitThePathCannotBeBuilt) {
    Event event = sample_event();
    event.aggregate_id = "../hunter2";
    for (const char* name : kFormats) {
        const BuildResult result = build(name, event, "http://h/{aggregate_id}");
        EXPECT_FALSE(result.ok) << name;
        EXPECT_FALSE(result.error.empty()) << name;
        EXPECT_EQ(result.error.find("hunter2"), std::string::npos) << name;
        EXPECT_TRUE(build(name, event, "http://h/?id={aggregate_id}").ok) << name;
    }
}

// ---------------------------------------------------------------------------------------------

TEST(Json, StringsAreEscaped) {
    EXPECT_EQ(json_string(""), R"("")");
    EXPECT_EQ(json_string(R"(a"b\c/d)"), R"("a\"b\\c/d")");
    EXPECT_EQ(json_string("\0\x01\t\n\r\x1f\x7f"s),
              R"("\u0000\u0001\u0009\u000a\u000d\u001f\u007f")");
    EXPECT_EQ(json_string("\u00e9\u20ac\U0001F600"), "\"\u00e9\u20ac\U0001F600\"");
}

TEST(Rfc3339, EdgesOfTheCalendar) {
    constexpr Micros kDay = 24 * kHour;
    EXPECT_EQ(rfc3339(0), "1970-01-01T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(-1), "1969-12-31T23:59:59.999999Z");
    EXPECT_EQ(rfc3339(-kSecond), "1969-12-31T23:59:59.000000Z");
    EXPECT_EQ(rfc3339(-kDay), "1969-12-31T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(-62'135'596'800 * kSecond), "0001-01-01T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(253'402'300'799 * kSecond + 999'999), "9999-12-31T23:59:59.999999Z");
    EXPECT_EQ(rfc3339(951'782'400 * kSecond), "2000-02-29T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(1'709'164'800 * kSecond), "2024-02-29T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(-2'203'891'200 * kSecond), "1900-03-01T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(-2'203'891'200 * kSecond - 1), "1900-02-28T23:59:59.999999Z");
    EXPECT_EQ(rfc3339(4'107'542'400 * kSecond), "2100-03-01T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(4'107'542'400 * kSecond - 1), "2100-02-28T23:59:59.999999Z");
}

TEST(Sequence, SortsAsText) {
    EXPECT_EQ(sequence_text(0), "0000000000000000000");
    EXPECT_EQ(sequence_text(42), "0000000000000000042");
    EXPECT_EQ(sequence_text(INT64_MAX), "9223372036854775807");
    EXPECT_LT(sequence_text(9), sequence_text(10));
    EXPECT_LT(sequence_text(-1), sequence_text(0));
}

TEST(Sequence, NegativeNumbersKeepTheirSign) {
    EXPECT_EQ(sequence_text(-1), "-000000000000000001");
    EXPECT_EQ(sequence_text(INT64_MIN), "-9223372036854775808");
}

} // namespace
} // namespace outbox::core
