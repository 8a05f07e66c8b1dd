// (d) The writer of the latency runs: one event per transaction at a fixed rate.
//
// BEGIN, a 4-column INSERT … RETURNING id, COMMIT, started on an absolute schedule so that a slow
// commit does not slow the rest. Writes "id before_us after_us" a line to --out: CLOCK_REALTIME
// just before COMMIT was sent, and when it had returned.
#include <vector>

#include <libpq-fe.h>

#include "common.hpp"

namespace {

using Result = bench::Handle<PGresult, PQclear>;

Result checked(PGconn* connection, PGresult* raw) {
    Result result(raw);
    const ExecStatusType status = PQresultStatus(raw);
    if (status != PGRES_COMMAND_OK && status != PGRES_TUPLES_OK)
        bench::die(PQerrorMessage(connection));
    return result;
}

struct Written {
    std::string id;
    std::int64_t before;
    std::int64_t after;
};

Written write_event(PGconn* connection, long n, long aggregates) {
    const std::string aggregate = bench::aggregate_id(n, aggregates);
    const std::string payload = bench::payload(n);
    const char* values[] = {aggregate.c_str(), payload.c_str()};
    (void)checked(connection, PQexec(connection, "BEGIN"));
    const Result row =
        checked(connection, PQexecPrepared(connection, "insert", 2, values, nullptr, nullptr, 0));
    Written written{PQgetvalue(row.get(), 0, 0), bench::realtime_us(), 0};
    (void)checked(connection, PQexec(connection, "COMMIT"));
    written.after = bench::realtime_us();
    return written;
}

} // namespace

int main(int argc, char** argv) {
    const bench::Options options(argc, argv);
    const long count = options.number("count", 1000);
    const long step_ns = 1000000000L / options.number("rate", 50);
    const bench::Handle<PGconn, PQfinish> connection(PQconnectdb(options.text("conninfo").c_str()));
    if (PQstatus(connection.get()) != CONNECTION_OK)
        bench::die(PQerrorMessage(connection.get()));
    (void)checked(
        connection.get(),
        PQprepare(connection.get(), "insert",
                  "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) "
                  "VALUES ('order', $1, 'order.created', $2) RETURNING id",
                  0, nullptr));

    std::vector<Written> all;
    all.reserve(static_cast<std::size_t>(count));
    timespec due{};
    clock_gettime(CLOCK_MONOTONIC, &due);
    for (long n = 0; n < count; ++n) {
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &due, nullptr);
        all.push_back(write_event(connection.get(), n, options.number("aggregates", 2000)));
        due.tv_nsec += step_ns;
        due.tv_sec += due.tv_nsec / 1000000000L;
        due.tv_nsec %= 1000000000L;
    }

    const bench::Handle<std::FILE, std::fclose> out(std::fopen(options.text("out").c_str(), "w"));
    if (!out)
        bench::die("cannot write --out");
    for (const Written& written : all)
        std::fprintf(out.get(), "%s %lld %lld\n", written.id.c_str(),
                     static_cast<long long>(written.before), static_cast<long long>(written.after));
    return 0;
}
