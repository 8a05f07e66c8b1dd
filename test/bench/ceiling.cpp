// (a) The ceiling: how many POSTs a second libcurl itself reaches on this machine.
//
// Every event is in memory before the clock starts, body and header list both, in the shape of the
// cloudevents format. 64 easy handles are reused over curl_multi_perform + curl_multi_poll, each on
// a kept-alive connection (opened before the clock starts). There is no database, no ordering and
// nothing to record: what a relay built on libcurl reaches can only be below this figure.
#include <sys/resource.h>

#include <vector>

#include <curl/curl.h>

#include "common.hpp"

namespace {

struct Event {
    std::string body;
    bench::Handle<curl_slist, curl_slist_free_all> headers;
};

void add(Event& event, const std::string& line) {
    curl_slist* longer = curl_slist_append(event.headers.get(), line.c_str());
    if (longer == nullptr)
        bench::die("out of memory");
    (void)event.headers.release();
    event.headers.reset(longer);
}

std::vector<Event> make_events(long count, long aggregates) {
    std::vector<Event> events(static_cast<std::size_t>(count));
    for (long n = 0; n < count; ++n) {
        Event& event = events[static_cast<std::size_t>(n)];
        const std::string id = bench::format("%08lx-7b1d-4c55-9a3e-5f2d8c6e%04lx", n, n % 65536);
        const std::string aggregate = bench::aggregate_id(n, aggregates);
        event.body = bench::payload(n);
        add(event, "Content-Type: application/json");
        add(event, "Idempotency-Key: " + id);
        add(event, "ce-specversion: 1.0");
        add(event, "ce-id: " + id);
        add(event, "ce-source: urn:outbox:7300000000000000000:bench");
        add(event, "ce-type: order.created");
        add(event, "ce-subject: order/" + aggregate);
        add(event, "ce-time: 2024-01-01T12:00:00.000000Z");
        add(event, "ce-partitionkey: " + aggregate);
        add(event, bench::format("ce-sequence: %019ld", n + 1));
    }
    return events;
}

std::size_t discard(char*, std::size_t size, std::size_t count, void*) {
    return size * count;
}

class Poster {
  public:
    Poster(const std::string& url, std::size_t connections) : multi_(curl_multi_init()) {
        curl_multi_setopt(multi_.get(), CURLMOPT_MAXCONNECTS, static_cast<long>(connections));
        for (std::size_t i = 0; i < connections; ++i) {
            handles_.emplace_back(curl_easy_init());
            CURL* easy = handles_.back().get();
            curl_easy_setopt(easy, CURLOPT_URL, url.c_str());
            curl_easy_setopt(easy, CURLOPT_POST, 1L);
            curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1);
            curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
            curl_easy_setopt(easy, CURLOPT_PROXY, "");
            curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, discard);
            curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, 15000L);
        }
    }

    // Posts the first count events, one each, and returns when every answer is complete.
    void post(const std::vector<Event>& events, std::size_t count) {
        std::size_t next = 0;
        std::size_t answered = 0;
        for (auto& handle : handles_)
            if (next < count)
                start(handle.get(), events[next++]);
        while (answered < count) {
            int running = 0;
            check(curl_multi_perform(multi_.get(), &running));
            bool refilled = false;
            int left = 0;
            while (const CURLMsg* message = curl_multi_info_read(multi_.get(), &left)) {
                CURL* easy = message->easy_handle;
                long status = 0;
                curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
                if (message->data.result != CURLE_OK || status != 200)
                    bench::die(bench::format("POST failed: %s, status %ld",
                                             curl_easy_strerror(message->data.result), status));
                ++answered;
                check(curl_multi_remove_handle(multi_.get(), easy));
                if (next < count) {
                    start(easy, events[next++]);
                    refilled = true;
                }
            }
            if (!refilled && answered < count)
                check(curl_multi_poll(multi_.get(), nullptr, 0, 1000, nullptr));
        }
    }

  private:
    static void check(CURLMcode code) {
        if (code != CURLM_OK)
            bench::die(curl_multi_strerror(code));
    }
    void start(CURL* easy, const Event& event) {
        curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE, static_cast<long>(event.body.size()));
        curl_easy_setopt(easy, CURLOPT_POSTFIELDS, event.body.c_str());
        curl_easy_setopt(easy, CURLOPT_HTTPHEADER, event.headers.get());
        check(curl_multi_add_handle(multi_.get(), easy));
    }

    bench::Handle<CURLM, curl_multi_cleanup> multi_;
    std::vector<bench::Handle<CURL, curl_easy_cleanup>> handles_;
};

double cpu_seconds() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    return static_cast<double>(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           static_cast<double>(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

} // namespace

int main(int argc, char** argv) {
    const bench::Options options(argc, argv);
    const long count = options.number("events", 20000);
    const auto connections = static_cast<std::size_t>(options.number("connections", 64));
    curl_global_init(CURL_GLOBAL_DEFAULT);
    const std::vector<Event> events = make_events(count, options.number("aggregates", 2000));
    Poster poster(options.text("url"), connections);
    poster.post(events, std::min(connections, events.size()));

    const double cpu_before = cpu_seconds();
    const double before = bench::steady_seconds();
    poster.post(events, events.size());
    const double seconds = bench::steady_seconds() - before;
    const double cpu = cpu_seconds() - cpu_before;
    std::printf(R"({"events": %ld, "seconds": %.6f, "rate": %.1f, "cpu_us_per_request": %.2f})"
                "\n",
                count, seconds, static_cast<double>(count) / seconds,
                cpu * 1e6 / static_cast<double>(count));
    return 0;
}
