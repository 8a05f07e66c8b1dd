// (d) The receiver of the latency runs: when did each event arrive?
//
// One epoll loop, any number of kept-alive connections. The clock (CLOCK_REALTIME, microseconds) is
// read when the first bytes of a request have been read, the answer is an empty 200. The event is
// the ce-id header, or the Idempotency-Key where there is none. Prints the port it got; at SIGTERM
// it writes "id arrival_us" for every request, in order of arrival, to --out.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <unordered_map>
#include <vector>

#include <strings.h>

#include "common.hpp"

namespace {

struct Arrival {
    std::string id;
    std::int64_t at;
};

struct Connection {
    std::string input;
    std::int64_t began = 0;
};

// The value of a header, or nothing; head ends with an empty line.
std::string_view header(std::string_view head, std::string_view name) {
    for (auto line = head.find("\r\n"); line != std::string_view::npos;) {
        const auto start = line + 2;
        line = head.find("\r\n", start);
        if (line == std::string_view::npos)
            break;
        const auto text = head.substr(start, line - start);
        if (text.size() > name.size() && text[name.size()] == ':' &&
            strncasecmp(text.data(), name.data(), name.size()) == 0) {
            const auto value = text.find_first_not_of(' ', name.size() + 1);
            return value == std::string_view::npos ? std::string_view() : text.substr(value);
        }
    }
    return {};
}

class Server {
  public:
    Server() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof address;
        if (bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 ||
            listen(listener_, 512) != 0 ||
            getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0)
            bench::die("cannot listen");
        port_ = ntohs(address.sin_port);

        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGTERM);
        sigprocmask(SIG_BLOCK, &set, nullptr);
        signals_ = signalfd(-1, &set, SFD_CLOEXEC);
        watch(listener_);
        watch(signals_);
        arrivals_.reserve(100000);
    }
    int port() const { return port_; }
    const std::vector<Arrival>& arrivals() const { return arrivals_; }

    void serve_until_sigterm() {
        for (;;) {
            epoll_event ready[64];
            const int count = epoll_wait(epoll_, ready, 64, -1);
            for (int i = 0; i < count; ++i) {
                const int fd = ready[i].data.fd;
                if (fd == signals_)
                    return;
                if (fd == listener_)
                    accept_one();
                else if (!receive(fd, connections_[fd])) {
                    connections_.erase(fd);
                    close(fd);
                }
            }
        }
    }

  private:
    void watch(int fd) {
        epoll_event interest{};
        interest.events = EPOLLIN;
        interest.data.fd = fd;
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &interest) != 0)
            bench::die("epoll_ctl failed");
    }
    void accept_one() {
        const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        const int on = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
        watch(fd);
    }
    // False when the connection is over.
    bool receive(int fd, Connection& connection) {
        char piece[16384];
        const ssize_t got = read(fd, piece, sizeof piece);
        if (got <= 0)
            return false;
        if (connection.input.empty())
            connection.began = bench::realtime_us();
        connection.input.append(piece, static_cast<std::size_t>(got));
        while (take_request(connection)) {
            static constexpr std::string_view answer =
                "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
            if (write(fd, answer.data(), answer.size()) != static_cast<ssize_t>(answer.size()))
                return false;
        }
        return true;
    }
    // True when the input began with a whole request, which is then recorded and removed.
    bool take_request(Connection& connection) {
        const auto end = connection.input.find("\r\n\r\n");
        if (end == std::string::npos)
            return false;
        const auto head = std::string_view(connection.input).substr(0, end + 4);
        const std::string length(header(head, "content-length"));
        const std::size_t size = end + 4 + std::strtoul(length.c_str(), nullptr, 10);
        if (connection.input.size() < size)
            return false;
        auto id = header(head, "ce-id");
        if (id.empty())
            id = header(head, "idempotency-key");
        arrivals_.push_back({std::string(id), connection.began});
        connection.input.erase(0, size);
        connection.began = bench::realtime_us();
        return true;
    }

    int epoll_;
    int listener_ = -1;
    int signals_ = -1;
    int port_ = 0;
    std::unordered_map<int, Connection> connections_;
    std::vector<Arrival> arrivals_;
};

} // namespace

int main(int argc, char** argv) {
    const bench::Options options(argc, argv);
    Server server;
    std::printf("%d\n", server.port());
    std::fflush(stdout);
    server.serve_until_sigterm();

    const bench::Handle<std::FILE, std::fclose> out(std::fopen(options.text("out").c_str(), "w"));
    if (!out)
        bench::die("cannot write --out");
    for (const Arrival& arrival : server.arrivals())
        std::fprintf(out.get(), "%s %lld\n", arrival.id.c_str(),
                     static_cast<long long>(arrival.at));
    return 0;
}
