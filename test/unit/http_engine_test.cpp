// Accidents with HTTP: an answer taken for another, an event that was sent and counts as not sent
// (or the other way round), a loop that hangs or spins, a descriptor that leaks.
#include "net/http_engine.hpp"

#include <gtest/gtest.h>

#include <curl/curl.h>

#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <map>

#include "unit/scripted_server.hpp"

namespace outbox::net {
namespace {

using core::Answer;
using core::kMillisecond;
using core::kSecond;
using core::Micros;
using core::Transport;
using core::Uuid;
using std::chrono::milliseconds;
using test::answer;
using test::FullListener;
using test::Received;
using test::Reply;
using test::ScriptedServer;
using test::Then;

using Clock = std::chrono::steady_clock;

Uuid id_of(int number) {
    Uuid id;
    std::memcpy(id.bytes.data(), &number, sizeof(number));
    return id;
}

int number_of(const Uuid& id) {
    int number = 0;
    std::memcpy(&number, id.bytes.data(), sizeof(number));
    return number;
}

std::size_t open_files() {
    const std::filesystem::directory_iterator files("/proc/self/fd");
    return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

class HttpEngineTest : public testing::Test {
  protected:
    static void SetUpTestSuite() { curl_global_init(CURL_GLOBAL_DEFAULT); }
    static void TearDownTestSuite() { curl_global_cleanup(); }

    HttpEngineTest() {
        options.connect_timeout = 2 * kSecond;
        options.request_timeout = 10 * kSecond;
        create();
    }

    void create() {
        std::string error;
        engine = HttpEngine::create(options, error);
        ASSERT_NE(engine, nullptr) << error;
    }

    void submit(int number, const std::string& url, std::string body = "{}",
                std::vector<core::Header> headers = {}) {
        engine->submit(id_of(number), {url, std::move(headers), std::move(body)});
    }

    // Waits as the worker does, for the descriptor and the time the engine names and nothing else,
    // until `count` requests in all have ended.
    void drive(std::size_t count) {
        const auto deadline = Clock::now() + std::chrono::seconds{20};
        while (answers.size() < count) {
            wait(deadline);
            ASSERT_LT(Clock::now(), deadline) << "only " << answers.size() << " answers";
        }
    }

    void drive_for(milliseconds time) {
        for (const auto deadline = Clock::now() + time; Clock::now() < deadline;)
            wait(deadline);
    }

    void wait(Clock::time_point deadline) {
        const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
        const long named = engine->timeout_ms();
        pollfd fd{engine->wait_fd(), POLLIN, 0};
        poll(&fd, 1, static_cast<int>(named < 0 ? left : std::min<long>(named, left)));
        ++steps;
        engine->step();
        for (Finished& finished : engine->take_finished()) {
            const bool added =
                answers.emplace(number_of(finished.id), std::move(finished.answer)).second;
            EXPECT_TRUE(added) << "two answers to one request";
        }
    }

    // One request from start to end.
    Answer ask(const std::string& url, std::string body = "{}",
               std::vector<core::Header> headers = {}) {
        answers.clear();
        submit(0, url, std::move(body), std::move(headers));
        drive(1);
        return answers[0];
    }

    // The answer to a request that the server answers so.
    Answer answer_to(Reply reply) {
        ScriptedServer server([&reply](const Received&) { return reply; });
        return ask(server.url());
    }

    EngineOptions options;
    std::unique_ptr<HttpEngine> engine;
    std::map<int, Answer> answers;
    int steps = 0;
};

// --- requests ---

TEST_F(HttpEngineTest, AnswerComesWithStatusBodyAndNoError) {
    ScriptedServer server([](const Received&) { return Reply{answer(202, "thanks")}; });
    const Answer got = ask(server.url("/in?x=1"), R"({"a":1})");
    EXPECT_EQ(got.transport, Transport::complete);
    EXPECT_EQ(got.status, 202);
    EXPECT_EQ(got.body, "thanks");
    EXPECT_EQ(got.error, "");
    EXPECT_EQ(got.retry_after, std::nullopt);
    ASSERT_EQ(server.requests().size(), 1U);
    const Received request = server.requests()[0];
    EXPECT_EQ(request.line, "POST /in?x=1 HTTP/1.1");
    EXPECT_EQ(request.body, R"({"a":1})");
    EXPECT_EQ(request.header("content-length"), "7");
    EXPECT_EQ(engine->running(), 0U);
}

TEST_F(HttpEngineTest, HeadersGoAsTheyAreAndNoOthers) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    ask(server.url(), "{}",
        {{"Content-Type", "application/json"},
         {"x-plain", "a; b=\"c\", d: e"},
         {"x-empty", ""},
         {"X-UTF", "\xE2\x82\xAC"}});
    const Received request = server.requests().at(0);
    EXPECT_EQ(request.header("content-type"), "application/json");
    EXPECT_EQ(request.header("x-plain"), "a; b=\"c\", d: e");
    EXPECT_EQ(request.header("x-empty"), "");
    EXPECT_EQ(request.header("x-utf"), "\xE2\x82\xAC");
    EXPECT_EQ(request.header("accept"), std::nullopt);
    EXPECT_EQ(request.header("expect"), std::nullopt);
    EXPECT_EQ(request.header("accept-encoding"), std::nullopt);
    EXPECT_EQ(request.header("cookie"), std::nullopt);
}

TEST_F(HttpEngineTest, HeaderOfSpacesIsSentAsEmpty) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    ask(server.url(), "{}", {{"x-spaces", "  "}, {"x-space", " "}});
    EXPECT_EQ(server.requests().at(0).header("x-spaces"), "");
    EXPECT_EQ(server.requests().at(0).header("x-space"), "");
}

TEST_F(HttpEngineTest, AcceptOfTheEventIsSent) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    ask(server.url(), "{}", {{"accept", "text/plain"}});
    EXPECT_EQ(server.requests().at(0).header("accept"), "text/plain");
}

TEST_F(HttpEngineTest, HeadersOfOneRequestAreNotInTheNext) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    ask(server.url(), "first", {{"x-secret", "1"}});
    ask(server.url(), "");
    EXPECT_EQ(server.requests().at(1).header("x-secret"), std::nullopt);
    EXPECT_EQ(server.requests().at(1).body, "");
    EXPECT_EQ(server.requests().at(1).header("content-length"), "0");
}

TEST_F(HttpEngineTest, LargeBodyAndAnyBytesArriveWhole) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    std::string body(5'000'000, '\0');
    for (std::size_t i = 0; i < body.size(); ++i)
        body[i] = static_cast<char>(i * 31);
    EXPECT_EQ(ask(server.url(), body).status, 200);
    EXPECT_EQ(server.requests().at(0).body, body);
    EXPECT_EQ(server.requests().at(0).header("expect"), std::nullopt);
}

TEST_F(HttpEngineTest, PathIsSentAsItIs) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    ask(server.url("/a/../b/./%2e%2E//c"));
    EXPECT_EQ(server.requests().at(0).line, "POST /a/../b/./%2e%2E//c HTTP/1.1");
}

TEST_F(HttpEngineTest, EnvironmentProxyIsIgnored) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    for (const char* name : {"http_proxy", "all_proxy", "ALL_PROXY"})
        setenv(name, "http://127.0.0.1:1/", 1);
    const Answer got = ask(server.url());
    for (const char* name : {"http_proxy", "all_proxy", "ALL_PROXY"})
        unsetenv(name);
    EXPECT_EQ(got.status, 200);
}

TEST_F(HttpEngineTest, CookiesAreNotKept) {
    ScriptedServer server(
        [](const Received&) { return Reply{answer(200, "", "Set-Cookie: a=b\r\n")}; });
    ask(server.url());
    ask(server.url());
    EXPECT_EQ(server.requests().at(1).header("cookie"), std::nullopt);
}

// --- answers ---

TEST_F(HttpEngineTest, EveryStatusComesThrough) {
    for (const int status : {200, 204, 299, 301, 304, 400, 404, 429, 500, 503, 599, 999}) {
        const std::string body = status == 204 || status == 304 ? "" : "x";
        const Answer got = answer_to({answer(status, body)});
        EXPECT_EQ(got.transport, Transport::complete) << status;
        EXPECT_EQ(got.status, status);
    }
}

TEST_F(HttpEngineTest, RedirectIsNotFollowed) {
    ScriptedServer server(
        [](const Received&) { return Reply{answer(307, "", "Location: /elsewhere\r\n")}; });
    EXPECT_EQ(ask(server.url()).status, 307);
    EXPECT_EQ(server.requests().size(), 1U);
}

TEST_F(HttpEngineTest, InterimAnswersAreNotTheAnswer) {
    const std::string interim = "HTTP/1.1 100 Continue\r\n\r\n"
                                "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    const Answer got = answer_to({interim + answer(201, "made")});
    EXPECT_EQ(got.transport, Transport::complete);
    EXPECT_EQ(got.status, 201);
    EXPECT_EQ(got.body, "made");
}

TEST_F(HttpEngineTest, OldProtocolEndsByClosing) {
    const Answer got = answer_to({"HTTP/1.0 200 OK\r\n\r\ndone", Then::close});
    EXPECT_EQ(got.transport, Transport::complete);
    EXPECT_EQ(got.status, 200);
    EXPECT_EQ(got.body, "done");
}

TEST_F(HttpEngineTest, ChunkedAnswerIsJoined) {
    const Answer got = answer_to({"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
                                  "3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"});
    EXPECT_EQ(got.transport, Transport::complete);
    EXPECT_EQ(got.body, "abcde");
}

TEST_F(HttpEngineTest, EncodedBodyIsNotDecoded) {
    const Answer got = answer_to({answer(500, "\x1f\x8b...", "Content-Encoding: gzip\r\n")});
    EXPECT_EQ(got.transport, Transport::complete);
    EXPECT_EQ(got.body, "\x1f\x8b...");
}

TEST_F(HttpEngineTest, HugeAnswerIsCutAndItsStatusDecides) {
    for (const int status : {200, 500}) {
        ScriptedServer server([status](const Received& request) {
            return request.body == "huge" ? Reply{answer(status, std::string(5'000'000, 'x'))}
                                          : Reply{answer(204)};
        });
        const Answer got = ask(server.url(), "huge");
        EXPECT_EQ(got.transport, Transport::complete);
        EXPECT_EQ(got.status, status);
        EXPECT_EQ(got.error, "");
        EXPECT_GE(got.body.size(), 1000U);
        EXPECT_LE(got.body.size(), 65'536U);
        EXPECT_EQ(ask(server.url(), "next").status, 204); // not the rest of the huge one
    }
}

TEST_F(HttpEngineTest, EndlessBodyEndsSoon) {
    const Answer got =
        answer_to({"HTTP/1.1 200 OK\r\n\r\n" + std::string(1'000'000, 'x'), Then::keep});
    EXPECT_EQ(got.transport, Transport::complete);
    EXPECT_EQ(got.status, 200);
}

TEST_F(HttpEngineTest, EndlessHeadersAreNoAnswer) {
    std::string headers = "HTTP/1.1 200 OK\r\n";
    while (headers.size() < 1'000'000)
        headers += "X-More: " + std::string(1000, 'x') + "\r\n";
    const Answer got = answer_to({headers + "Content-Length: 0\r\n\r\n"});
    EXPECT_EQ(got.transport, Transport::interrupted);
    EXPECT_EQ(got.status, 0);
    EXPECT_NE(got.error, "");
}

TEST_F(HttpEngineTest, EndlessInterimAnswersAreNoAnswer) {
    std::string interim;
    while (interim.size() < 1'000'000)
        interim += "HTTP/1.1 100 Continue\r\n\r\n";
    EXPECT_EQ(answer_to({interim + answer(200)}).transport, Transport::interrupted);
}

// --- Retry-After ---

TEST_F(HttpEngineTest, RetryAfterInSeconds) {
    const auto asked = [this](const std::string& value) {
        return answer_to({answer(503, "", "Retry-After: " + value + "\r\n")}).retry_after;
    };
    EXPECT_EQ(asked("120"), 120 * kSecond);
    EXPECT_EQ(asked("1"), 1 * kSecond);
    EXPECT_GE(asked("99999999999"), core::kHour); // not yet capped, not overflown
    EXPECT_GE(asked("9223372036854775807"), core::kHour);
    for (const char* nonsense : {"-5", "", "soon", "99999999999999999999999", "-99999999999999999"})
        EXPECT_GE(asked(nonsense).value_or(0), 0) << nonsense;
}

TEST_F(HttpEngineTest, RetryAfterAsADate) {
    const auto asked = [this](std::time_t at) {
        char date[64];
        std::tm utc{};
        gmtime_r(&at, &utc);
        std::strftime(date, sizeof(date), "%a, %d %b %Y %H:%M:%S GMT", &utc);
        return answer_to({answer(429, "", std::string{"Retry-After: "} + date + "\r\n")})
            .retry_after.value_or(0);
    };
    const std::time_t now = std::time(nullptr);
    EXPECT_GE(asked(now + 600), 590 * kSecond);
    EXPECT_LE(asked(now + 600), 600 * kSecond);
    EXPECT_EQ(asked(now - 600), 0);
}

TEST_F(HttpEngineTest, RetryAfterOfOneAnswerIsNotInTheNext) {
    ScriptedServer server([](const Received& request) {
        return Reply{answer(503, "", request.body == "1" ? "Retry-After: 9\r\n" : "")};
    });
    EXPECT_EQ(ask(server.url(), "1").retry_after, 9 * kSecond);
    EXPECT_EQ(ask(server.url(), "2").retry_after, std::nullopt);
}

// --- failures before anything was sent ---

TEST_F(HttpEngineTest, RefusedConnectionIsNotSent) {
    const Answer got = ask(test::refusing_url());
    EXPECT_EQ(got.transport, Transport::not_sent);
    EXPECT_EQ(got.status, 0);
    EXPECT_NE(got.error, "");
}

TEST_F(HttpEngineTest, UnknownHostIsNotSent) {
    const Answer got = ask("http://nonexistent.invalid/");
    EXPECT_EQ(got.transport, Transport::not_sent);
    EXPECT_NE(got.error, "");
}

TEST_F(HttpEngineTest, UrlThatLibcurlRefusesIsNotSent) {
    for (const char* url :
         {"", "http://", "ftp://127.0.0.1/", "file:///etc/passwd", "nonsense://x"})
        EXPECT_EQ(ask(url).transport, Transport::not_sent) << url;
}

TEST_F(HttpEngineTest, PlainServerBehindHttpsIsNotSent) {
    ScriptedServer server([](const Received&) { return Reply{"nonsense", Then::close}; });
    const Answer got = ask("https" + server.url().substr(4));
    EXPECT_EQ(got.transport, Transport::not_sent) << got.error;
    EXPECT_TRUE(server.requests().empty());
}

TEST_F(HttpEngineTest, ConnectTimeoutIsNotSent) {
    FullListener full;
    options.connect_timeout = 200 * kMillisecond;
    engine->set_options(options);
    const auto start = Clock::now();
    const Answer got = ask(full.url());
    EXPECT_EQ(got.transport, Transport::not_sent);
    EXPECT_GE(Clock::now() - start, milliseconds{190});
    EXPECT_LT(Clock::now() - start, milliseconds{1500});
}

TEST_F(HttpEngineTest, RequestTimeoutWhileConnectingIsNotSent) {
    FullListener full;
    options.request_timeout = 200 * kMillisecond;
    engine->set_options(options);
    EXPECT_EQ(ask(full.url()).transport, Transport::not_sent);
}

// Handles are pooled: what an earlier request left behind must not speak for this one.
TEST_F(HttpEngineTest, EarlierSuccessDoesNotMakeAFailureLookSent) {
    ScriptedServer server(
        [](const Received&) { return Reply{answer(503, "busy", "Retry-After: 7\r\n")}; });
    FullListener full;
    options.connect_timeout = 200 * kMillisecond;
    engine->set_options(options);
    for (const std::string& url : {full.url(), test::refusing_url()}) {
        EXPECT_EQ(ask(server.url()).status, 503);
        const Answer got = ask(url);
        EXPECT_EQ(got.transport, Transport::not_sent) << got.error;
        EXPECT_EQ(got.status, 0);
        EXPECT_EQ(got.body, "");
        EXPECT_EQ(got.retry_after, std::nullopt);
    }
}

// --- failures after something was sent ---

TEST_F(HttpEngineTest, SilentServerIsInterrupted) {
    options.request_timeout = 200 * kMillisecond;
    engine->set_options(options);
    ScriptedServer server([](const Received&) {
        return Reply{"", Then::keep, milliseconds{5000}};
    });
    const auto start = Clock::now();
    const Answer got = ask(server.url());
    EXPECT_EQ(got.transport, Transport::interrupted);
    EXPECT_EQ(got.status, 0);
    EXPECT_NE(got.error, "");
    EXPECT_LT(Clock::now() - start, milliseconds{1500});
    EXPECT_EQ(server.requests().size(), 1U);
}

TEST_F(HttpEngineTest, SilentServerOnAKeptConnectionIsInterrupted) {
    ScriptedServer server([](const Received& request) {
        return request.body == "1" ? Reply{answer(200)} : Reply{"", Then::keep, milliseconds{5000}};
    });
    EXPECT_EQ(ask(server.url(), "1").status, 200);
    options.request_timeout = 200 * kMillisecond;
    engine->set_options(options);
    EXPECT_EQ(ask(server.url(), "2").transport, Transport::interrupted);
    EXPECT_EQ(server.accepted(), 1);
}

TEST_F(HttpEngineTest, AnswerThatStopsHalfwayIsInterrupted) {
    options.request_timeout = 200 * kMillisecond;
    engine->set_options(options);
    const Answer got = answer_to({"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"});
    EXPECT_EQ(got.transport, Transport::interrupted);
    EXPECT_EQ(got.status, 0); // no success
}

TEST_F(HttpEngineTest, CutAnswersAreInterrupted) {
    for (const char* bytes : {
             "",
             "H",
             "HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
             "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
             "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
             "HTTP/1.1 100 Continue\r\n\r\n",
         }) {
        const Answer got = answer_to({bytes, Then::close});
        EXPECT_EQ(got.transport, Transport::interrupted) << bytes;
        EXPECT_EQ(got.status, 0) << bytes;
    }
}

// libcurl is content with a status line; whether the rest said so, nobody knows.
TEST_F(HttpEngineTest, AnswerCutInItsHeadersIsNoSuccess) {
    for (const char* bytes : {"HTTP/1.1 200 OK\r\n", "HTTP/1.1 200 OK\r\nContent-Le",
                              "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n",
                              "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n"}) {
        const Answer got = answer_to({bytes, Then::close});
        EXPECT_EQ(got.transport, Transport::interrupted) << bytes;
        EXPECT_EQ(got.status, 0) << bytes;
        EXPECT_NE(got.error, "") << bytes;
    }
}

TEST_F(HttpEngineTest, ResetIsInterrupted) {
    EXPECT_EQ(answer_to({"", Then::reset}).transport, Transport::interrupted);
    EXPECT_EQ(
        answer_to({"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", Then::reset}).transport,
        Transport::interrupted);
}

// The request went out: such a receiver must not be asked again for ever.
TEST_F(HttpEngineTest, GarbageAnswersAreInterrupted) {
    for (const char* bytes : {
             "hello\r\n\r\n",
             "SSH-2.0-OpenSSH_9.2\r\n",
             "HTTP/1.1 abc OK\r\n\r\n",
             "HTTP/9.9 200 OK\r\n\r\n",
             "HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
             "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
             "\x15\x03\x01\x02",
         }) {
        const Answer got = answer_to({bytes, Then::close});
        EXPECT_EQ(got.transport, Transport::interrupted) << bytes << ": " << got.error;
        EXPECT_EQ(got.status, 0) << bytes;
    }
}

// --- connections ---

TEST_F(HttpEngineTest, ConnectionIsKeptBetweenRequests) {
    ScriptedServer server([](const Received&) { return Reply{answer(200, "x")}; });
    for (int i = 0; i < 50; ++i)
        EXPECT_EQ(ask(server.url()).status, 200);
    EXPECT_EQ(server.accepted(), 1);
}

TEST_F(HttpEngineTest, ManyRequestsGoAtOnce) {
    ScriptedServer server([](const Received& request) {
        return Reply{answer(200, request.body), Then::keep, milliseconds{300}};
    });
    constexpr int kRequests = 200;
    for (int i = 0; i < kRequests; ++i)
        submit(i, server.url(), std::to_string(i));
    EXPECT_EQ(engine->running(), static_cast<std::size_t>(kRequests));
    drive(kRequests);
    for (int i = 0; i < kRequests; ++i) {
        EXPECT_EQ(answers[i].status, 200);
        EXPECT_EQ(answers[i].body, std::to_string(i)); // its own answer
    }
    EXPECT_GT(server.most_at_once(), kRequests / 2);
    EXPECT_EQ(engine->running(), 0U);
}

TEST_F(HttpEngineTest, ConnectionsAreSharedByManyRequests) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    int sent = 0;
    for (int round = 0; round < 20; ++round) {
        for (int i = 0; i < 20; ++i)
            submit(sent++, server.url());
        drive(static_cast<std::size_t>(sent));
    }
    EXPECT_LE(server.accepted(), 30);
}

TEST_F(HttpEngineTest, IdleConnectionsAreBounded) {
    options.max_connections = 5;
    create();
    const std::size_t before = open_files();
    ScriptedServer server([](const Received&) {
        return Reply{answer(200), Then::keep, milliseconds{50}};
    });
    const std::size_t servers = open_files() - before;
    for (int i = 0; i < 50; ++i)
        submit(i, server.url());
    drive(50);
    drive_for(milliseconds{200});
    // Those of the server are in this process, too; one of libcurl's own may come on top.
    EXPECT_LE(open_files(), before + servers + 2 * (5 + 1) + 2);
}

TEST_F(HttpEngineTest, ServerMayCloseIdleConnections) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    for (int i = 1; i <= 20; ++i) {
        EXPECT_EQ(ask(server.url()).transport, Transport::complete);
        server.close_connections();
        drive_for(milliseconds{5});
    }
    EXPECT_EQ(server.requests().size(), 20U);
}

TEST_F(HttpEngineTest, ConnectionClosedInTheMomentOfReuseIsReplaced) {
    ScriptedServer server([](const Received& request) {
        // The second request of the first connection meets its end.
        return request.connection == 1 && request.body == "2" ? Reply{"", Then::close}
                                                              : Reply{answer(200)};
    });
    EXPECT_EQ(ask(server.url(), "1").status, 200);
    EXPECT_EQ(ask(server.url(), "2").status, 200);
    EXPECT_EQ(server.accepted(), 2);
}

// libcurl closes the socket, the kernel gives the number to the next one: epoll must not mix them
// up.
TEST_F(HttpEngineTest, ThousandConnectionsOneAfterTheOther) {
    ScriptedServer server([](const Received&) {
        return Reply{answer(200, "x", "Connection: close\r\n"), Then::close};
    });
    ask(server.url());
    const std::size_t before = open_files();
    for (int i = 0; i < 1000; ++i)
        ASSERT_EQ(ask(server.url()).transport, Transport::complete) << i;
    EXPECT_EQ(server.accepted(), 1001);
    EXPECT_LE(open_files(), before + 2);
}

TEST_F(HttpEngineTest, MixtureOfEndsMixesNothingUp) {
    ScriptedServer server([](const Received& request) {
        switch (std::stoi(request.body) % 5) {
        case 0:
            return Reply{answer(200, request.body, "Connection: close\r\n"), Then::close};
        case 1:
            return Reply{"", Then::reset, milliseconds{1}};
        case 2:
            return Reply{answer(200, request.body), Then::keep, milliseconds{2}};
        case 3:
            return Reply{answer(200, request.body + "and more").substr(0, 40), Then::close};
        default:
            return Reply{answer(200, request.body)};
        }
    });
    const std::string refusing = test::refusing_url();
    int sent = 0;
    for (int round = 0; round < 40; ++round) {
        for (int i = 0; i < 12; ++i, ++sent)
            submit(sent, sent % 7 == 0 ? refusing : server.url(), std::to_string(sent));
        drive(static_cast<std::size_t>(sent) - (round % 2 == 0 ? 4 : 0));
    }
    drive(static_cast<std::size_t>(sent));
    for (const auto& [number, got] : answers) {
        if (number % 7 == 0) {
            EXPECT_EQ(got.transport, Transport::not_sent) << number;
        } else if (number % 5 == 1 || number % 5 == 3) {
            EXPECT_EQ(got.transport, Transport::interrupted) << number << got.error;
        } else {
            EXPECT_EQ(got.body, std::to_string(number)) << got.error;
        }
    }
}

TEST_F(HttpEngineTest, NoDescriptorLeaks) {
    ScriptedServer server([](const Received& request) {
        return request.body == "late" ? Reply{"", Then::keep, milliseconds{5000}}
                                      : Reply{answer(200)};
    });
    engine.reset();
    const std::size_t before = open_files();
    for (int round = 0; round < 5; ++round) {
        create();
        answers.clear();
        submit(1, server.url());
        submit(2, test::refusing_url());
        submit(3, "http://nonexistent.invalid/");
        drive(3);
        submit(4, server.url(), "late"); // under way when the engine ends
        submit(5, "http://nonexistent.invalid/");
        engine->step();
        engine.reset();
        server.close_connections();
    }
    for (int waits = 0; open_files() > before && waits < 2000; ++waits)
        std::this_thread::sleep_for(milliseconds{10}); // a resolver may hang
    EXPECT_LE(open_files(), before);
}

// --- waiting ---

TEST_F(HttpEngineTest, NothingToDoMeansNothingToWaitFor) {
    pollfd fd{engine->wait_fd(), POLLIN, 0};
    EXPECT_EQ(poll(&fd, 1, 0), 0);
    EXPECT_EQ(engine->timeout_ms(), -1);
    engine->step();
    EXPECT_TRUE(engine->take_finished().empty());
    EXPECT_EQ(engine->running(), 0U);
}

TEST_F(HttpEngineTest, SlowAnswerIsNotWaitedForBusily) {
    ScriptedServer server([](const Received&) {
        return Reply{answer(200), Then::keep, milliseconds{500}};
    });
    EXPECT_EQ(ask(server.url()).status, 200);
    EXPECT_LT(steps, 25);
    steps = 0;
    EXPECT_EQ(ask(server.url()).status, 200); // on a kept connection
    EXPECT_LT(steps, 25);
}

TEST_F(HttpEngineTest, IdleEngineSleeps) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    EXPECT_EQ(ask(server.url()).status, 200);
    steps = 0;
    drive_for(milliseconds{400});
    EXPECT_LT(steps, 10);
}

TEST_F(HttpEngineTest, ClosedIdleConnectionWakesOnce) {
    ScriptedServer server([](const Received&) { return Reply{answer(200)}; });
    EXPECT_EQ(ask(server.url()).status, 200);
    drive_for(milliseconds{50});
    server.close_connections();
    steps = 0;
    drive_for(milliseconds{300});
    EXPECT_LT(steps, 10);
    pollfd fd{engine->wait_fd(), POLLIN, 0};
    EXPECT_EQ(poll(&fd, 1, 0), 0);
}

TEST_F(HttpEngineTest, ConnectingIsNotWaitedForBusily) {
    FullListener full;
    options.connect_timeout = 500 * kMillisecond;
    engine->set_options(options);
    EXPECT_EQ(ask(full.url()).transport, Transport::not_sent);
    EXPECT_LT(steps, 25);
}

TEST_F(HttpEngineTest, RefusedRequestIsReportedAtOnce) {
    submit(1, ""); // libcurl may refuse it here or in the first step
    EXPECT_EQ(engine->timeout_ms(), 0);
    engine->step();
    EXPECT_EQ(engine->take_finished().size(), 1U);
}

// One slow request under way; another must start and end while it waits.
TEST_F(HttpEngineTest, SlowRequestHoldsUpNoOther) {
    ScriptedServer server([](const Received& request) {
        return Reply{answer(200), Then::keep, milliseconds{request.body == "slow" ? 1000 : 0}};
    });
    submit(-1, server.url(), "slow");
    const auto start = Clock::now();
    for (int i = 1; i <= 100; ++i) {
        submit(i, server.url());
        drive(static_cast<std::size_t>(i));
    }
    EXPECT_LT(Clock::now() - start, milliseconds{950});
    EXPECT_EQ(answers.count(-1), 0U);
    drive(101);
    EXPECT_EQ(answers[-1].status, 200);
}

TEST_F(HttpEngineTest, SignalMaskIsLeftAsItWas) {
    sigset_t before;
    pthread_sigmask(SIG_SETMASK, nullptr, &before);
    ask("http://nonexistent.invalid/");
    sigset_t after;
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    for (int signal = 1; signal < NSIG; ++signal)
        EXPECT_EQ(sigismember(&before, signal), sigismember(&after, signal)) << signal;
}

// --- options ---

TEST_F(HttpEngineTest, NewTimeoutsAreForLaterRequests) {
    ScriptedServer server([](const Received&) {
        return Reply{answer(200), Then::keep, milliseconds{400}};
    });
    submit(1, server.url());
    options.request_timeout = 100 * kMillisecond;
    engine->set_options(options);
    submit(2, server.url());
    drive(2);
    EXPECT_EQ(answers[1].transport, Transport::complete);
    EXPECT_EQ(answers[2].transport, Transport::interrupted);
}

// A certificate file taken back must be out of force for requests that start later, whichever
// handle they run on.
TEST_F(HttpEngineTest, OldCertificateFileIsForgotten) {
    ScriptedServer server([](const Received&) { return Reply{"nonsense", Then::close}; });
    const std::string url = "https" + server.url().substr(4);
    const std::string plain = ask(url).error; // it speaks no TLS
    options.ca_file = "/nonexistent.pem";
    engine->set_options(options);
    answers.clear();
    submit(1, url); // under way while the setting changes
    options.ca_file.clear();
    engine->set_options(options);
    drive(1);
    EXPECT_NE(answers[1].error, plain);
    EXPECT_EQ(ask(url).error, plain);
}

} // namespace
} // namespace outbox::net
