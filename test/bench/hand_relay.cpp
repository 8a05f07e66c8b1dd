// (b) The baseline: the relay a careful team writes by hand, one event after the other.
//
// libpq with prepared statements and one kept-alive libcurl connection. Each round is a
// transaction: fetch up to 100 rows FOR UPDATE SKIP LOCKED, per row one POST and one UPDATE,
// COMMIT. An answer that is not 2xx counts an attempt. --until-empty ends the program when a fetch
// finds nothing (throughput); --listen waits for NOTIFY outbox_event instead (latency), with a poll
// every second, until SIGTERM.
#include <poll.h>

#include <csignal>

#include <curl/curl.h>
#include <libpq-fe.h>

#include "common.hpp"

namespace {

volatile std::sig_atomic_t stopped = 0;

std::size_t discard(char*, std::size_t size, std::size_t count, void*) {
    return size * count;
}

class Database {
  public:
    explicit Database(const std::string& conninfo) : connection_(PQconnectdb(conninfo.c_str())) {
        if (PQstatus(connection_.get()) != CONNECTION_OK)
            bench::die(PQerrorMessage(connection_.get()));
    }
    using Result = bench::Handle<PGresult, PQclear>;

    void execute(const char* sql) { (void)checked(PQexec(connection_.get(), sql)); }
    void prepare(const char* name, const char* sql) {
        (void)checked(PQprepare(connection_.get(), name, sql, 0, nullptr));
    }
    template <typename... Texts>
    Result run(const char* name, Texts... texts) {
        const char* values[] = {texts...};
        return checked(
            PQexecPrepared(connection_.get(), name, sizeof...(texts), values, nullptr, nullptr, 0));
    }
    // Until a notification or a second has passed; all that have come are taken.
    void wait() {
        if (!take_notifications()) {
            pollfd socket{PQsocket(connection_.get()), POLLIN, 0};
            (void)poll(&socket, 1, 1000);
            if (PQconsumeInput(connection_.get()) == 0)
                bench::die(PQerrorMessage(connection_.get()));
            (void)take_notifications();
        }
    }

  private:
    Result checked(PGresult* raw) {
        Result result(raw);
        const ExecStatusType status = PQresultStatus(raw);
        if (status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK)
            bench::die(PQerrorMessage(connection_.get()));
        return result;
    }
    bool take_notifications() {
        bool any = false;
        while (PGnotify* notification = PQnotifies(connection_.get())) {
            PQfreemem(notification);
            any = true;
        }
        return any;
    }

    bench::Handle<PGconn, PQfinish> connection_;
};

class Endpoint {
  public:
    explicit Endpoint(const std::string& url) : easy_(curl_easy_init()) {
        curl_easy_setopt(easy_.get(), CURLOPT_URL, url.c_str());
        curl_easy_setopt(easy_.get(), CURLOPT_POST, 1L);
        curl_easy_setopt(easy_.get(), CURLOPT_HTTP_VERSION, CURL_HTTP_VERSION_1_1);
        curl_easy_setopt(easy_.get(), CURLOPT_NOSIGNAL, 1L);
        curl_easy_setopt(easy_.get(), CURLOPT_PROXY, "");
        curl_easy_setopt(easy_.get(), CURLOPT_WRITEFUNCTION, discard);
        curl_easy_setopt(easy_.get(), CURLOPT_TIMEOUT_MS, 15000L);
    }

    // True when a 2xx came back for row n of a fetch.
    bool post(const PGresult* rows, int n) {
        bench::Handle<curl_slist, curl_slist_free_all> headers(
            curl_slist_append(nullptr, "Content-Type: application/json"));
        const auto add = [&](const char* name, int column) {
            header_ = name;
            header_ += PQgetvalue(rows, n, column);
            (void)curl_slist_append(headers.get(), header_.c_str());
        };
        add("Idempotency-Key: ", 0);
        add("Aggregate-Type: ", 1);
        add("Aggregate-Id: ", 2);
        add("Event-Type: ", 3);
        curl_easy_setopt(easy_.get(), CURLOPT_HTTPHEADER, headers.get());
        curl_easy_setopt(easy_.get(), CURLOPT_POSTFIELDSIZE,
                         static_cast<long>(PQgetlength(rows, n, 4)));
        curl_easy_setopt(easy_.get(), CURLOPT_POSTFIELDS, PQgetvalue(rows, n, 4));
        const CURLcode code = curl_easy_perform(easy_.get());
        long status = 0;
        curl_easy_getinfo(easy_.get(), CURLINFO_RESPONSE_CODE, &status);
        curl_easy_setopt(easy_.get(), CURLOPT_HTTPHEADER, nullptr);
        return code == CURLE_OK && status >= 200 && status < 300;
    }

  private:
    bench::Handle<CURL, curl_easy_cleanup> easy_;
    std::string header_;
};

// One transaction; the number of rows it fetched.
int relay_batch(Database& database, Endpoint& endpoint, const char* limit) {
    database.execute("BEGIN");
    const auto rows = database.run("fetch", "10", limit);
    const int count = PQntuples(rows.get());
    for (int n = 0; n < count; ++n) {
        const bool delivered = endpoint.post(rows.get(), n);
        (void)database.run(delivered ? "mark" : "fail", PQgetvalue(rows.get(), n, 0));
    }
    database.execute("COMMIT");
    return count;
}

} // namespace

int main(int argc, char** argv) {
    const bench::Options options(argc, argv, "--until-empty --listen");
    struct sigaction on_term {};
    on_term.sa_handler = [](int) { stopped = 1; };
    sigaction(SIGTERM, &on_term, nullptr);

    curl_global_init(CURL_GLOBAL_DEFAULT);
    Database database(options.text("conninfo"));
    Endpoint endpoint(options.text("url"));
    database.prepare("fetch", "SELECT id, aggregate_type, aggregate_id, event_type, payload "
                              "FROM outbox_events WHERE processed_at IS NULL AND attempts < $1 "
                              "ORDER BY created_at LIMIT $2 FOR UPDATE SKIP LOCKED");
    database.prepare("mark", "UPDATE outbox_events SET processed_at = now() WHERE id = $1");
    database.prepare("fail", "UPDATE outbox_events SET attempts = attempts + 1 WHERE id = $1");
    if (options.has("listen"))
        database.execute("LISTEN outbox_event");
    const std::string limit = std::to_string(options.number("batch", 100));
    while (stopped == 0) {
        if (relay_batch(database, endpoint, limit.c_str()) > 0)
            continue;
        if (options.has("until-empty"))
            break;
        database.wait();
    }
    return 0;
}
