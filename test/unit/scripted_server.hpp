// A small HTTP/1.1 server in a thread of the test, on a port of its own: answers each request with
// bytes from a script, late, cut or not at all, and remembers what it got.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace outbox::test {

struct Received {
    int connection = 0; // 1 for the first accepted
    std::string line;   // "POST /path HTTP/1.1"
    std::vector<std::string> headers;
    std::string body;

    // The value of the header with that name, in lower case; nothing when it did not come.
    [[nodiscard]] std::optional<std::string> header(std::string_view name) const {
        for (const std::string& line_of : headers) {
            const std::size_t colon = line_of.find(':');
            std::string key = line_of.substr(0, colon);
            std::ranges::transform(key, key.begin(),
                                   [](unsigned char c) { return static_cast<char>(tolower(c)); });
            if (key == name) {
                const std::size_t value = line_of.find_first_not_of(' ', colon + 1);
                return value == std::string::npos ? "" : line_of.substr(value);
            }
        }
        return std::nullopt;
    }
};

enum class Then { keep, close, reset };

struct Reply {
    std::string bytes;
    Then then = Then::keep;
    std::chrono::milliseconds delay{0};
};

// An answer with a body and its length.
inline std::string answer(int status, const std::string& body = "", const std::string& more = "") {
    return "HTTP/1.1 " + std::to_string(status) + " X\r\n" + more +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

class ScriptedServer {
  public:
    using Script = std::function<Reply(const Received&)>;

    explicit ScriptedServer(Script script) : script_(std::move(script)) {
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof(address);
        auto* generic = reinterpret_cast<sockaddr*>(&address);
        if (bind(listener_, generic, size) != 0 || listen(listener_, 512) != 0 ||
            getsockname(listener_, generic, &size) != 0 || pipe2(wake_, O_NONBLOCK) != 0) {
            std::abort();
        }
        port_ = ntohs(address.sin_port);
        thread_ = std::thread([this] { run(); });
    }

    ~ScriptedServer() {
        stop_ = true;
        wake();
        thread_.join();
        for (const auto& [fd, connection] : connections_) {
            close(fd);
        }
        close(listener_);
        close(wake_[0]);
        close(wake_[1]);
    }
    ScriptedServer(const ScriptedServer&) = delete;
    ScriptedServer& operator=(const ScriptedServer&) = delete;

    [[nodiscard]] std::string url(const std::string& path = "/") const {
        return "http://127.0.0.1:" + std::to_string(port_) + path;
    }
    [[nodiscard]] std::vector<Received> requests() const {
        const std::lock_guard lock(mutex_);
        return requests_;
    }
    [[nodiscard]] int accepted() const { return accepted_; }
    // The most requests that were unanswered at one time.
    [[nodiscard]] int most_at_once() const { return most_at_once_; }
    // Closes all connections, as a server does with idle ones.
    void close_connections() {
        close_all_ = true;
        wake();
    }

  private:
    using Clock = std::chrono::steady_clock;
    struct Connection {
        int number = 0;
        std::string in;
        std::string out;
        std::optional<Clock::time_point> due; // of `out`
        Then then = Then::keep;
    };

    void wake() { (void)!write(wake_[1], "x", 1); }

    void run() {
        while (!stop_) {
            std::vector<pollfd> fds{{listener_, POLLIN, 0}, {wake_[0], POLLIN, 0}};
            int timeout = -1;
            for (const auto& [fd, connection] : connections_) {
                const bool due = connection.due && *connection.due <= Clock::now();
                if (connection.due && !due) {
                    const auto left = std::chrono::ceil<std::chrono::milliseconds>(*connection.due -
                                                                                   Clock::now());
                    const int wait = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
                    timeout = timeout < 0 ? wait : std::min(timeout, wait);
                }
                const short events = connection.due ? (due ? POLLOUT : 0) : POLLIN;
                fds.push_back({fd, events, 0});
            }
            poll(fds.data(), fds.size(), timeout);
            char drain[64];
            while (read(wake_[0], drain, sizeof(drain)) > 0) {
            }
            for (std::size_t i = 2; i < fds.size(); ++i) {
                if (fds[i].revents != 0) {
                    serve(fds[i].fd, connections_.at(fds[i].fd));
                }
            }
            if (close_all_.exchange(false)) {
                while (!connections_.empty()) {
                    drop(connections_.begin()->first, Then::close);
                }
            }
            accept_all();
        }
    }

    void accept_all() {
        for (;;) {
            const int fd = accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (fd < 0) {
                return;
            }
            connections_[fd].number = ++accepted_;
        }
    }

    void serve(int fd, Connection& connection) {
        if (connection.due) {
            send_out(fd, connection);
            return;
        }
        char buffer[65536];
        const ssize_t got = read(fd, buffer, sizeof(buffer));
        if (got <= 0) {
            drop(fd, Then::close);
            return;
        }
        connection.in.append(buffer, static_cast<std::size_t>(got));
        if (!connection.in.starts_with(std::string_view{"POST "}.substr(0, connection.in.size()))) {
            (void)!write(fd, "no HTTP\n", 8); // TLS, say
            drop(fd, Then::close);
            return;
        }
        take_request(connection);
    }

    void take_request(Connection& connection) {
        const std::size_t head = connection.in.find("\r\n\r\n");
        if (head == std::string::npos) {
            return;
        }
        Received received;
        received.connection = connection.number;
        std::size_t at = 0;
        while (at < head) {
            const std::size_t end = connection.in.find("\r\n", at);
            const std::string line = connection.in.substr(at, end - at);
            at == 0 ? (void)(received.line = line) : received.headers.push_back(line);
            at = end + 2;
        }
        const std::size_t size = std::stoul(received.header("content-length").value_or("0"));
        if (connection.in.size() < head + 4 + size) {
            return;
        }
        received.body = connection.in.substr(head + 4, size);
        connection.in.erase(0, head + 4 + size);
        Reply reply = script_(received);
        connection.out = std::move(reply.bytes);
        connection.then = reply.then;
        connection.due = Clock::now() + reply.delay;
        most_at_once_ = std::max(most_at_once_.load(), ++unanswered_);
        const std::lock_guard lock(mutex_);
        requests_.push_back(std::move(received));
    }

    void send_out(int fd, Connection& connection) {
        if (!connection.out.empty()) {
            const ssize_t sent =
                send(fd, connection.out.data(), connection.out.size(), MSG_NOSIGNAL);
            if (sent < 0) {
                drop(fd, Then::close);
                return;
            }
            connection.out.erase(0, static_cast<std::size_t>(sent));
        }
        if (!connection.out.empty()) {
            return;
        }
        if (connection.then != Then::keep) {
            drop(fd, connection.then);
            return;
        }
        --unanswered_;
        connection.due.reset();
    }

    void drop(int fd, Then how) {
        if (how == Then::reset) {
            const linger abort{1, 0};
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
        }
        const auto it = connections_.find(fd);
        unanswered_ -= it->second.due ? 1 : 0;
        connections_.erase(it);
        close(fd);
    }

    Script script_;
    int listener_ = -1;
    int wake_[2] = {-1, -1};
    std::uint16_t port_ = 0;
    std::map<int, Connection> connections_;
    int unanswered_ = 0;
    std::atomic<int> accepted_ = 0;
    std::atomic<int> most_at_once_ = 0;
    std::atomic<bool> stop_ = false;
    std::atomic<bool> close_all_ = false;
    mutable std::mutex mutex_;
    std::vector<Received> requests_;
    std::thread thread_;
};

// An address where nobody listens.
inline std::string refusing_url() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    if (bind(fd, generic, size) != 0 || getsockname(fd, generic, &size) != 0) {
        std::abort();
    }
    close(fd);
    return "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/";
}

// A listener whose queue is full: connecting to it goes on for ever.
class FullListener {
  public:
    FullListener() {
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof(address);
        auto* generic = reinterpret_cast<sockaddr*>(&address);
        if (bind(listener_, generic, size) != 0 || listen(listener_, 0) != 0 ||
            getsockname(listener_, generic, &size) != 0) {
            std::abort();
        }
        port_ = ntohs(address.sin_port);
        for (int i = 0; i < 8; ++i) {
            const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
            (void)connect(fd, generic, size);
            waiting_.push_back(fd);
        }
    }
    ~FullListener() {
        for (const int fd : waiting_) {
            close(fd);
        }
        close(listener_);
    }
    FullListener(const FullListener&) = delete;
    FullListener& operator=(const FullListener&) = delete;

    [[nodiscard]] std::string url() const {
        return "http://127.0.0.1:" + std::to_string(port_) + "/";
    }

  private:
    int listener_ = -1;
    std::uint16_t port_ = 0;
    std::vector<int> waiting_;
};

} // namespace outbox::test
