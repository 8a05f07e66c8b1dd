// The meter of (b) and (c): how fast a backlog drains, seen from outside the relay.
//
// The receiver's own counter of requests (nginx stub_status) is read every 5 ms over one kept-alive
// connection; each reading counts itself and is subtracted. The clock starts at the first reading
// that shows deliveries and the rate counts only what came after it, so neither the start of the
// relay nor the step of the readings is in the figure. When the counter has reached --events the
// database is asked, every 2 ms, whether a row is still without processed_at; the clock stops at
// the question that was answered with no. Nothing asks the database while the backlog drains.
// Without progress for --patience seconds it gives up.
//
// Prints "ready" when it watches (start the relay then) and one line of JSON at the end:
//   rate            first delivery until every row is recorded: the figure of the table
//   rate_received   first delivery until the last arrival
//   received        requests in all, a moment after the end: more than --events are duplicates
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <libpq-fe.h>

#include "common.hpp"

namespace {

void sleep_ms(long milliseconds) {
    const timespec pause{milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&pause, nullptr);
}

class Receiver {
  public:
    explicit Receiver(long port) : socket_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<std::uint16_t>(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0)
            bench::die("cannot connect to the receiver");
        base_ = requests();
    }
    ~Receiver() { close(socket_); }
    Receiver(const Receiver&) = delete;
    Receiver& operator=(const Receiver&) = delete;

    // Requests of others since the start.
    long count() {
        const long now = requests();
        return now - base_ - ++readings_;
    }

  private:
    long requests() {
        static constexpr std::string_view question =
            "GET /stub_status HTTP/1.1\r\nHost: bench\r\n\r\n";
        if (write(socket_, question.data(), question.size()) !=
            static_cast<ssize_t>(question.size()))
            bench::die("the receiver closed the connection");
        std::string answer;
        char piece[1024];
        while (answer.find("Waiting:") == std::string::npos || answer.back() != '\n') {
            const ssize_t got = read(socket_, piece, sizeof piece);
            if (got <= 0)
                bench::die("the receiver closed the connection");
            answer.append(piece, static_cast<std::size_t>(got));
        }
        static constexpr std::string_view heading = "server accepts handled requests";
        const auto at = answer.find(heading);
        long accepts = 0;
        long handled = 0;
        long total = 0;
        if (at == std::string::npos || std::sscanf(answer.c_str() + at + heading.size(),
                                                   "%ld %ld %ld", &accepts, &handled, &total) != 3)
            bench::die("the receiver's counter cannot be read");
        return total;
    }

    int socket_;
    long base_ = 0;
    long readings_ = 0;
};

class Database {
  public:
    explicit Database(const std::string& conninfo) : connection_(PQconnectdb(conninfo.c_str())) {
        if (PQstatus(connection_.get()) != CONNECTION_OK)
            bench::die(PQerrorMessage(connection_.get()));
    }
    // The first field of the first row.
    std::string ask(const char* sql) {
        const bench::Handle<PGresult, PQclear> result(PQexec(connection_.get(), sql));
        if (PQresultStatus(result.get()) != PGRES_TUPLES_OK)
            bench::die(PQerrorMessage(connection_.get()));
        return PQgetvalue(result.get(), 0, 0);
    }

  private:
    bench::Handle<PGconn, PQfinish> connection_;
};

} // namespace

int main(int argc, char** argv) {
    const bench::Options options(argc, argv);
    const long events = options.number("events", 20000);
    const auto patience = static_cast<double>(options.number("patience", 30));
    Database database(options.text("conninfo"));
    Receiver receiver(options.number("port", 0));
    double progress = bench::steady_seconds();
    const auto give_up_if_stuck = [&](long received) {
        if (bench::steady_seconds() - progress < patience)
            return;
        const std::string pending =
            database.ask("SELECT count(*) FROM outbox_events WHERE processed_at IS NULL");
        bench::die(bench::format("no progress: %ld of %ld received, %s without processed_at",
                                 received, events, pending.c_str()));
    };
    // Asked once before, so that at the end the answer is as fresh as the question.
    static constexpr auto unrecorded =
        "SELECT EXISTS (SELECT FROM outbox_events WHERE processed_at IS NULL)";
    if (database.ask(unrecorded) != "t")
        bench::die("there is no backlog to drain");
    std::puts("ready");
    std::fflush(stdout);

    long at_first = 0;
    double first = 0;
    double last = 0;
    for (long received = 0; received < events;) {
        sleep_ms(received == 0 ? 1 : 5);
        const long now = receiver.count();
        last = bench::steady_seconds();
        if (now != received)
            progress = last;
        received = now;
        if (received > 0 && at_first == 0) {
            at_first = received;
            first = last;
        }
        give_up_if_stuck(received);
    }
    double settled = bench::steady_seconds();
    while (database.ask(unrecorded) != "f") {
        give_up_if_stuck(events);
        sleep_ms(2);
        settled = bench::steady_seconds();
    }
    sleep_ms(300);
    const auto counted = static_cast<double>(events - at_first);
    std::printf(R"({"rate": %.1f, "rate_received": %.1f, "seconds": %.4f, "counted": %ld, )"
                R"("received": %ld})"
                "\n",
                counted / (settled - first), last > first ? counted / (last - first) : 0.0,
                settled - first, events - at_first, receiver.count());
    return 0;
}
