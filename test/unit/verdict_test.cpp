// Accidents with answers: an event taken for delivered, an outage that uses up attempts, a
// last_error that PostgreSQL cannot store.
#include "core/verdict.hpp"

#include <gtest/gtest.h>

#include "core/retry.hpp"

namespace outbox::core {
namespace {

using namespace std::string_literals;
using namespace std::string_view_literals;

constexpr std::string_view kBad = "\xEF\xBF\xBD"; // U+FFFD

Answer complete(int status, std::string body = {}) {
    Answer answer;
    answer.transport = Transport::complete;
    answer.status = status;
    answer.body = std::move(body);
    return answer;
}

Answer failed(Transport transport, std::string error) {
    Answer answer;
    answer.transport = transport;
    answer.error = std::move(error);
    return answer;
}

// DESIGN 1.4 once more, in other words than the code's.
Outcome expected_outcome(int status) {
    switch (status) {
    case 429:
    case 502:
    case 503:
    case 504:
        return Outcome::lane_failure;
    default:
        return status / 100 == 2 ? Outcome::delivered : Outcome::event_failure;
    }
}

TEST(Verdict, EveryStatusHasItsMeaning) {
    for (int status = 100; status <= 999; ++status) {
        const Verdict verdict = judge(complete(status, "words"));
        EXPECT_EQ(verdict.outcome, expected_outcome(status)) << status;
        EXPECT_EQ(verdict.error.empty(), verdict.outcome == Outcome::delivered) << status;
    }
}

TEST(Verdict, StatusOfAnIncompleteAnswerIsNoSuccess) {
    Answer answer = failed(Transport::interrupted, "transfer closed with 10 bytes remaining");
    answer.status = 200;
    EXPECT_EQ(judge(answer).outcome, Outcome::event_failure);
    EXPECT_EQ(judge(answer).error, "transfer closed with 10 bytes remaining");
}

TEST(Verdict, NothingSentIsNotTheEventsFault) {
    const Verdict verdict = judge(failed(Transport::not_sent, "Could not resolve host"));
    EXPECT_EQ(verdict.outcome, Outcome::lane_failure);
    EXPECT_EQ(verdict.error, "Could not resolve host");
}

TEST(Verdict, OwnAbortChangesNothing) {
    Answer answer = failed(Transport::aborted, "shutdown");
    answer.status = 503;
    answer.retry_after = kSecond;
    const Verdict verdict = judge(answer);
    EXPECT_EQ(verdict.outcome, Outcome::aborted);
    EXPECT_FALSE(verdict.retry_after);
}

TEST(Verdict, FailureWithoutWordsStillSaysSomething) {
    EXPECT_EQ(judge(failed(Transport::interrupted, "")).error, "no answer");
    EXPECT_EQ(judge(complete(500)).error, "status 500");
    EXPECT_EQ(judge(complete(500, "\r\n \t\n")).error, "status 500");
}

TEST(Verdict, ErrorShowsTheAnswersFirstBytes) {
    EXPECT_EQ(judge(complete(503, "\n  try later\r\n")).error, "status 503: try later");
    EXPECT_EQ(judge(complete(422, "a\r\nb\0c"s)).error, "status 422: a b c");
}

TEST(Verdict, RedirectIsExplained) {
    EXPECT_EQ(judge(complete(302)).error, "status 302 (redirects are never followed)");
    EXPECT_EQ(judge(complete(308, "moved")).error,
              "status 308 (redirects are never followed): moved");
}

TEST(Verdict, RetryAfterIsCappedAndOnlyForFailures) {
    const auto asked = [](int status, Micros delay) {
        Answer answer = complete(status);
        answer.retry_after = delay;
        return judge(answer).retry_after;
    };
    EXPECT_EQ(asked(200, kSecond), std::nullopt);
    EXPECT_EQ(asked(503, kSecond), kSecond);
    EXPECT_EQ(asked(429, 48 * kHour), kRetryAfterCap);
    EXPECT_EQ(asked(500, -kSecond), 0);
    EXPECT_EQ(judge(complete(503)).retry_after, std::nullopt);
}

TEST(Verdict, HugeAnswerDoesNotFillTheTable) {
    for (const int status : {302, 500}) {
        const std::string error = judge(complete(status, std::string(100'000, 'x'))).error;
        EXPECT_EQ(error.size(), kMaxErrorBytes);
    }
    const std::string words(100'000, 'x');
    EXPECT_EQ(judge(failed(Transport::not_sent, words)).error.size(), kMaxErrorBytes);
    EXPECT_EQ(unbuildable(words).error.size(), kMaxErrorBytes);
}

TEST(Verdict, UnbuildableKeepsItsReason) {
    const Verdict verdict = unbuildable("a header name is reserved");
    EXPECT_EQ(verdict.outcome, Outcome::unbuildable);
    EXPECT_EQ(verdict.error, "a header name is reserved");
    EXPECT_FALSE(verdict.retry_after);
}

// ---------------------------------------------------------------------------------------------

std::string replaced(int times) {
    std::string text;
    for (int i = 0; i < times; ++i)
        text += kBad;
    return text;
}

TEST(Printable, ValidTextIsUntouched) {
    for (const std::string_view text :
         {""sv, "plain"sv, "Gr\u00fc\u00dfe \u20ac \U0001F600"sv, "\u00a0\u07ff\u0800\ud7ff"sv,
          "\ue000\uffff\U00010000\U0010ffff"sv})
        EXPECT_EQ(printable(text, 100), text);
}

TEST(Printable, ControlCharactersBecomeOneSpace) {
    EXPECT_EQ(printable("a\r\n\0\x1b\x7f"
                        "b"sv,
                        100),
              "a b");
    EXPECT_EQ(printable("a\u0080\u0085\u009f!"sv, 100), "a !");
    EXPECT_EQ(printable("a  b"sv, 100), "a  b");
}

TEST(Printable, InvalidBytesAreReplaced) {
    struct Case {
        std::string_view bytes;
        int replacements;
    };
    for (const auto& [bytes, replacements] : {
             Case{"\x80"sv, 1},                 // lone continuation
             Case{"\xff"sv, 1},                 // never a lead
             Case{"\xc0\xaf"sv, 2},             // overlong slash
             Case{"\xc1\xbf"sv, 2},             // overlong
             Case{"\xe0\x80\x80"sv, 3},         // overlong NUL
             Case{"\xe0\x9f\xbf"sv, 3},         // overlong
             Case{"\xf0\x8f\xbf\xbf"sv, 4},     // overlong
             Case{"\xed\xa0\x80"sv, 3},         // surrogate
             Case{"\xed\xbf\xbf"sv, 3},         // surrogate
             Case{"\xf4\x90\x80\x80"sv, 4},     // U+110000
             Case{"\xf5\x80\x80\x80"sv, 4},     // beyond
             Case{"\xf8\x88\x80\x80\x80"sv, 5}, // five bytes
             Case{"\xc3"sv, 1},                 // cut
             Case{"\xe2\x82"sv, 1},             // cut
             Case{"\xf0\x9f\x98"sv, 1},         // cut
         }) {
        EXPECT_EQ(printable(bytes, 100), replaced(replacements));
        EXPECT_EQ(printable(std::string(bytes) + "z", 100), replaced(replacements) + "z");
    }
}

TEST(Printable, CutNeverSplitsACharacter) {
    const std::string_view emoji = "\U0001F600\U0001F600"sv;
    EXPECT_EQ(printable(emoji, 8), emoji);
    for (const std::size_t limit : {4U, 5U, 6U, 7U})
        EXPECT_EQ(printable(emoji, limit), emoji.substr(0, 4));
    EXPECT_EQ(printable(emoji, 3), "");
    EXPECT_EQ(printable("\xff\xff", 5), kBad);
    EXPECT_EQ(printable("abc", 0), "");
}

TEST(Printable, AnyBytesGiveStableText) {
    std::uint32_t state = 1;
    for (int round = 0; round < 2000; ++round) {
        std::string bytes;
        for (int i = 0; i < 40; ++i) {
            state = state * 1664525U + 1013904223U;
            bytes += static_cast<char>(state >> 24U);
        }
        const std::string once = printable(bytes, 60);
        EXPECT_LE(once.size(), 60U);
        EXPECT_EQ(printable(once, 60), once); // so it is valid and has no control characters
    }
}

TEST(Redact, ARepeatedSecretIsHiddenEverywhere) {
    std::string text = "key s3cret, again s3cret and tok";
    redact(text, {"s3cret", "", "token"});
    EXPECT_EQ(text, "key ***, again *** and tok");
    std::string stars = "***";
    redact(stars, {"*"});
    EXPECT_EQ(stars, "*********");
}

} // namespace
} // namespace outbox::core
