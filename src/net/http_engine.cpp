// See http_engine.hpp.
#include "net/http_engine.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <unordered_map>
#include <utility>

#include <curl/curl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

namespace outbox::net {

namespace {

using core::Answer;
using core::Micros;
using core::Transport;

// More of an answer is cut; the status decides.
constexpr std::size_t kMaxBody = std::size_t{64} * 1024;
// What is kept of it, for last_error and the format's own success test.
constexpr std::size_t kKeptBody = std::size_t{16} * 1024;
// More header bytes than this are no HTTP answer.
constexpr std::size_t kMaxHeaders = std::size_t{256} * 1024;
constexpr long kIdleSeconds = 30;
constexpr long kLifetimeSeconds = 300;
constexpr long kDnsCacheSeconds = 60;

using Clock = std::chrono::steady_clock;

// libcurl may start a resolver thread inside its calls. It must inherit a mask that blocks
// everything, or it would run the server's signal handlers.
class SignalsBlocked {
  public:
    SignalsBlocked() noexcept {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_{};
};

struct EasyDeleter {
    void operator()(CURL* easy) const noexcept { curl_easy_cleanup(easy); }
};
struct ListDeleter {
    void operator()(curl_slist* list) const noexcept { curl_slist_free_all(list); }
};

// One request under way, and the easy handle it runs on; pooled.
struct Transfer {
    std::unique_ptr<CURL, EasyDeleter> easy;
    std::unique_ptr<curl_slist, ListDeleter> headers;
    core::Uuid id;
    core::Request request;
    std::string body;
    std::size_t body_bytes = 0;
    std::size_t header_bytes = 0;
    std::uint32_t generation = 0; // of the options that it was made with
    bool body_cut = false;
    bool headers_done = false; // the empty line after them came
    char error[CURL_ERROR_SIZE] = "";

    void clear() {
        headers.reset();
        request = {};
        body.clear();
        body_bytes = 0;
        header_bytes = 0;
        body_cut = false;
        headers_done = false;
        error[0] = '\0';
    }
};

// Appends to a curl list; false when memory is out.
bool append(std::unique_ptr<curl_slist, ListDeleter>& list, const char* line) {
    curl_slist* longer = curl_slist_append(list.get(), line);
    if (longer == nullptr) {
        return false;
    }
    (void)list.release();
    list.reset(longer);
    return true;
}

std::size_t on_body(char* data, std::size_t size, std::size_t count, void* user) noexcept {
    auto& transfer = *static_cast<Transfer*>(user);
    const std::size_t bytes = size * count;
    if (transfer.body.size() < kKeptBody) {
        try {
            transfer.body.append(data, std::min(bytes, kKeptBody - transfer.body.size()));
        } catch (...) {
            return bytes; // keep less
        }
    }
    transfer.body_bytes += bytes;
    if (transfer.body_bytes > kMaxBody) {
        transfer.body_cut = true;
        return 0; // ends the transfer
    }
    return bytes;
}

std::size_t on_header(char* data, std::size_t size, std::size_t count, void* user) noexcept {
    auto& transfer = *static_cast<Transfer*>(user);
    const std::string_view line{data, size * count};
    transfer.headers_done = line == "\r\n" || line == "\n";
    transfer.header_bytes += line.size();
    return transfer.header_bytes > kMaxHeaders ? 0 : line.size();
}

// Errors before the first byte of the request could leave.
bool nothing_sent(CURLcode code, CURL* easy) noexcept {
    switch (code) {
    case CURLE_FAILED_INIT:
    case CURLE_URL_MALFORMAT:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_CONNECT:
    case CURLE_OUT_OF_MEMORY:
    case CURLE_INTERFACE_FAILED:
    case CURLE_SSL_CONNECT_ERROR:
    case CURLE_SSL_ENGINE_NOTFOUND:
    case CURLE_SSL_ENGINE_SETFAILED:
    case CURLE_SSL_CERTPROBLEM:
    case CURLE_SSL_CIPHER:
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_USE_SSL_FAILED:
    case CURLE_SSL_ENGINE_INITFAILED:
    case CURLE_SSL_CACERT_BADFILE:
    case CURLE_SSL_SHUTDOWN_FAILED:
    case CURLE_SSL_CRL_BADFILE:
    case CURLE_SSL_ISSUER_ERROR:
    case CURLE_SSL_PINNEDPUBKEYNOTMATCH:
    case CURLE_SSL_INVALIDCERTSTATUS:
    case CURLE_NO_CONNECTION_AVAILABLE:
    case CURLE_PROXY:
        return true;
    default:
        break;
    }
    // A timeout, say: the request began to leave when the connection (with TLS) was ready for it.
    curl_off_t ready = 0;
    long request_bytes = 0;
    curl_easy_getinfo(easy, CURLINFO_PRETRANSFER_TIME_T, &ready);
    curl_easy_getinfo(easy, CURLINFO_REQUEST_SIZE, &request_bytes);
    return ready == 0 && request_bytes == 0;
}

Answer answer_of(Transfer& transfer, CURLcode code) {
    Answer answer;
    CURL* easy = transfer.easy.get();
    long status = 0;
    curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
    const bool cut_by_us = code == CURLE_WRITE_ERROR && transfer.body_cut;
    // libcurl is content with a connection that closes within the headers.
    const bool complete = (code == CURLE_OK || cut_by_us) && status >= 200 && transfer.headers_done;
    if (complete) {
        answer.transport = Transport::complete;
        answer.status = static_cast<int>(status);
        curl_off_t seconds = 0;
        if (curl_easy_getinfo(easy, CURLINFO_RETRY_AFTER, &seconds) == CURLE_OK && seconds > 0) {
            // Capped here already, so that no multiplication overflows.
            answer.retry_after = std::min<Micros>(seconds, 1'000'000) * core::kSecond;
        }
    } else {
        answer.transport = nothing_sent(code, easy) ? Transport::not_sent : Transport::interrupted;
        answer.error = transfer.error[0] != '\0' ? transfer.error
                       : code == CURLE_OK        ? "the answer was cut off"
                                                 : curl_easy_strerror(code);
    }
    answer.body = std::move(transfer.body);
    return answer;
}

} // namespace

struct HttpEngine::Impl {
    // What libcurl wants of a socket, and what epoll was told. The two are made equal only before a
    // wait, and a socket nobody wants stays registered until it stirs: a kept-alive connection
    // costs no epoll_ctl between requests.
    struct Socket {
        std::uint32_t wanted = 0;
        std::uint32_t registered = 0;
        bool known = false;      // to epoll
        bool connection = false; // ours; others are libcurl's own, closed behind our back
        bool dirty = false;      // listed in `changed`
    };

    int epoll_fd = -1;
    CURLM* multi = nullptr;
    EngineOptions options;
    std::unordered_map<curl_socket_t, Socket> sockets;
    std::vector<curl_socket_t> changed;
    std::uint32_t generation = 0; // of `options`, as far as a handle remembers them
    std::vector<std::unique_ptr<Transfer>> idle;
    std::unordered_map<CURL*, std::unique_ptr<Transfer>> busy;
    std::vector<Finished> finished;
    bool has_deadline = false;
    Clock::time_point deadline;

    Impl() = default;
    Impl(const Impl&) = delete;
    Impl& operator=(const Impl&) = delete;
    ~Impl() {
        const SignalsBlocked blocked;
        for (auto& [easy, transfer] : busy) {
            curl_multi_remove_handle(multi, easy);
        }
        busy.clear();
        idle.clear();
        if (multi != nullptr) {
            curl_multi_cleanup(multi);
        }
        if (epoll_fd >= 0) {
            close(epoll_fd);
        }
    }

    // --- libcurl's callbacks ---
    static int on_socket(CURL* /*easy*/, curl_socket_t fd, int what, void* user,
                         void* /*socket*/) noexcept {
        try {
            static_cast<Impl*>(user)->want(fd, what);
        } catch (...) {
            return -1;
        }
        return 0;
    }

    static int on_timer(CURLM* /*multi*/, long milliseconds, void* user) noexcept {
        auto& self = *static_cast<Impl*>(user);
        self.has_deadline = milliseconds >= 0;
        self.deadline = Clock::now() + std::chrono::milliseconds{std::max(milliseconds, 0L)};
        return 0;
    }

    static curl_socket_t on_open(void* user, curlsocktype /*purpose*/,
                                 curl_sockaddr* address) noexcept {
        const int fd = socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
        if (fd < 0) {
            return CURL_SOCKET_BAD;
        }
        try {
            static_cast<Impl*>(user)->sockets[fd] = Socket{.connection = true};
        } catch (...) {
            close(fd);
            return CURL_SOCKET_BAD;
        }
        return fd;
    }

    // close() takes the descriptor out of epoll by itself.
    static int on_close(void* user, curl_socket_t fd) noexcept {
        static_cast<Impl*>(user)->sockets.erase(fd);
        return close(fd);
    }

    // --- sockets ---
    void want(curl_socket_t fd, int what) {
        Socket& entry = sockets[fd];
        if (what == CURL_POLL_REMOVE) {
            entry.wanted = 0;
            if (!entry.connection) {
                forget_socket(fd);
            }
            return;
        }
        entry.wanted = ((what & CURL_POLL_IN) != 0 ? std::uint32_t{EPOLLIN} : 0U) |
                       ((what & CURL_POLL_OUT) != 0 ? std::uint32_t{EPOLLOUT} : 0U);
        if (!entry.dirty) {
            entry.dirty = true;
            changed.push_back(fd);
        }
    }

    void tell_epoll(curl_socket_t fd, Socket& entry) const {
        if (entry.wanted == entry.registered && entry.known) {
            return;
        }
        epoll_event event{};
        event.events = entry.wanted;
        event.data.fd = fd;
        if (epoll_ctl(epoll_fd, entry.known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, fd, &event) == 0) {
            entry.known = true;
            entry.registered = entry.wanted;
        }
    }

    void apply_changes() {
        for (const curl_socket_t fd : changed) {
            const auto it = sockets.find(fd);
            if (it == sockets.end()) {
                continue; // closed meanwhile
            }
            it->second.dirty = false;
            if (it->second.wanted != 0) {
                tell_epoll(fd, it->second);
            }
        }
        changed.clear();
    }

    // A socket that nobody wants stirred: the peer closed an idle connection. libcurl finds out by
    // itself.
    void forget_socket(curl_socket_t fd) {
        epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, nullptr);
        sockets.erase(fd);
    }

    // --- transfers ---
    std::unique_ptr<Transfer> take_idle() {
        if (!idle.empty()) {
            auto transfer = std::move(idle.back());
            idle.pop_back();
            return transfer;
        }
        auto transfer = std::make_unique<Transfer>();
        transfer->generation = generation;
        transfer->easy.reset(curl_easy_init());
        if (transfer->easy == nullptr) {
            return nullptr;
        }
        set_fixed_options(*transfer);
        return transfer;
    }

    void set_fixed_options(Transfer& transfer) {
        CURL* easy = transfer.easy.get();
        curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
        curl_easy_setopt(easy, CURLOPT_QUICK_EXIT, 1L);
        curl_easy_setopt(easy, CURLOPT_PROTOCOLS_STR, "http,https");
        curl_easy_setopt(easy, CURLOPT_PATH_AS_IS, 1L);
        curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
        curl_easy_setopt(easy, CURLOPT_FOLLOWLOCATION, 0L);
        curl_easy_setopt(easy, CURLOPT_PROXY, ""); // also shuts out the environment's
        curl_easy_setopt(easy, CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
        curl_easy_setopt(easy, CURLOPT_POST, 1L);
        curl_easy_setopt(easy, CURLOPT_TCP_NODELAY, 1L);
        curl_easy_setopt(easy, CURLOPT_MAXAGE_CONN, kIdleSeconds);
        curl_easy_setopt(easy, CURLOPT_MAXLIFETIME_CONN, kLifetimeSeconds);
        curl_easy_setopt(easy, CURLOPT_DNS_CACHE_TIMEOUT, kDnsCacheSeconds);
        curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, &on_body);
        curl_easy_setopt(easy, CURLOPT_WRITEDATA, &transfer);
        curl_easy_setopt(easy, CURLOPT_HEADERFUNCTION, &on_header);
        curl_easy_setopt(easy, CURLOPT_HEADERDATA, &transfer);
        curl_easy_setopt(easy, CURLOPT_ERRORBUFFER, transfer.error);
        curl_easy_setopt(easy, CURLOPT_OPENSOCKETFUNCTION, &on_open);
        curl_easy_setopt(easy, CURLOPT_OPENSOCKETDATA, this);
        curl_easy_setopt(easy, CURLOPT_CLOSESOCKETFUNCTION, &on_close);
        curl_easy_setopt(easy, CURLOPT_CLOSESOCKETDATA, this);
        curl_easy_setopt(easy, CURLOPT_PRIVATE, &transfer);
    }

    // Only what differs between requests.
    bool set_request_options(Transfer& transfer) const {
        CURL* easy = transfer.easy.get();
        const core::Request& request = transfer.request;
        bool listed = append(transfer.headers, "Expect:") && append(transfer.headers, "Accept:");
        std::string line;
        for (const core::Header& header : request.headers) {
            line.assign(header.name);
            // libcurl reads "name;" as a header without a value, "name:" as its removal.
            const bool blank = header.value.find_first_not_of(" \t") == std::string::npos;
            line.append(blank ? ";" : ": ").append(blank ? "" : header.value);
            listed = listed && append(transfer.headers, line.c_str());
        }
        const auto milliseconds = [](Micros time) {
            return static_cast<long>(std::max<Micros>(time / core::kMillisecond, 1));
        };
        return listed && curl_easy_setopt(easy, CURLOPT_URL, request.url.c_str()) == CURLE_OK &&
               curl_easy_setopt(easy, CURLOPT_HTTPHEADER, transfer.headers.get()) == CURLE_OK &&
               curl_easy_setopt(easy, CURLOPT_POSTFIELDS, request.body.data()) == CURLE_OK &&
               curl_easy_setopt(easy, CURLOPT_POSTFIELDSIZE_LARGE,
                                static_cast<curl_off_t>(request.body.size())) == CURLE_OK &&
               curl_easy_setopt(easy, CURLOPT_CONNECTTIMEOUT_MS,
                                milliseconds(options.connect_timeout)) == CURLE_OK &&
               curl_easy_setopt(easy, CURLOPT_TIMEOUT_MS, milliseconds(options.request_timeout)) ==
                   CURLE_OK &&
               (options.ca_file.empty() ||
                curl_easy_setopt(easy, CURLOPT_CAINFO, options.ca_file.c_str()) == CURLE_OK);
    }

    void finish_unsent(const core::Uuid& id, const char* why) {
        Answer answer;
        answer.transport = Transport::not_sent;
        answer.error = why;
        finished.push_back({id, std::move(answer)});
    }

    void submit(const core::Uuid& id, core::Request&& request) {
        std::unique_ptr<Transfer> transfer = take_idle();
        if (transfer == nullptr) {
            finish_unsent(id, "libcurl is out of memory");
            return;
        }
        transfer->id = id;
        transfer->request = std::move(request);
        if (!set_request_options(*transfer)) {
            finish_unsent(id, "libcurl refused the request");
            return; // the handle is in doubt: drop it
        }
        CURL* easy = transfer->easy.get();
        busy.emplace(easy, std::move(transfer));
        const SignalsBlocked blocked;
        if (const CURLMcode code = curl_multi_add_handle(multi, easy); code != CURLM_OK) {
            busy.erase(easy);
            finish_unsent(id, curl_multi_strerror(code));
        }
    }

    void collect() {
        int left = 0;
        while (CURLMsg* message = curl_multi_info_read(multi, &left)) {
            if (message->msg != CURLMSG_DONE) {
                continue;
            }
            CURL* easy = message->easy_handle;
            const CURLcode code = message->data.result;
            auto node = busy.extract(easy);
            std::unique_ptr<Transfer> transfer = std::move(node.mapped());
            finished.push_back({transfer->id, answer_of(*transfer, code)});
            curl_multi_remove_handle(multi, easy);
            transfer->clear();
            if (transfer->generation == generation && idle.size() < options.max_connections) {
                idle.push_back(std::move(transfer));
            }
        }
    }

    [[nodiscard]] bool timer_due() const { return has_deadline && Clock::now() >= deadline; }

    void step() {
        const SignalsBlocked blocked;
        int running = 0;
        if (timer_due()) {
            // libcurl names the next time only when it changes; until it does, look again soon.
            deadline = Clock::now() + std::chrono::milliseconds{1};
            curl_multi_socket_action(multi, CURL_SOCKET_TIMEOUT, 0, &running);
        }
        std::array<epoll_event, 128> events{};
        const int count = epoll_wait(epoll_fd, events.data(), static_cast<int>(events.size()), 0);
        for (int i = 0; i < count; ++i) {
            handle(events[static_cast<std::size_t>(i)]);
        }
        collect();
        apply_changes();
    }

    void handle(const epoll_event& event) {
        const curl_socket_t fd = event.data.fd;
        const auto it = sockets.find(fd);
        if (it == sockets.end()) {
            return;
        }
        if (it->second.wanted == 0) {
            // The peer closed an idle connection; libcurl finds out when it wants to use it.
            epoll_ctl(epoll_fd, EPOLL_CTL_DEL, fd, nullptr);
            it->second.known = false;
            return;
        }
        int mask = 0;
        mask |= (event.events & (EPOLLIN | EPOLLHUP)) != 0 ? CURL_CSELECT_IN : 0;
        mask |= (event.events & EPOLLOUT) != 0 ? CURL_CSELECT_OUT : 0;
        mask |= (event.events & EPOLLERR) != 0 ? CURL_CSELECT_ERR : 0;
        int running = 0;
        curl_multi_socket_action(multi, fd, mask, &running);
    }
};

HttpEngine::HttpEngine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpEngine::~HttpEngine() = default;

std::unique_ptr<HttpEngine> HttpEngine::create(const EngineOptions& options, std::string& error) {
    auto impl = std::make_unique<Impl>();
    impl->options = options;
    impl->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (impl->epoll_fd < 0) {
        error = std::string{"epoll_create1: "} + std::strerror(errno);
        return nullptr;
    }
    impl->multi = curl_multi_init();
    if (impl->multi == nullptr) {
        error = "libcurl gives no multi handle";
        return nullptr;
    }
    curl_multi_setopt(impl->multi, CURLMOPT_SOCKETFUNCTION, &Impl::on_socket);
    curl_multi_setopt(impl->multi, CURLMOPT_SOCKETDATA, impl.get());
    curl_multi_setopt(impl->multi, CURLMOPT_TIMERFUNCTION, &Impl::on_timer);
    curl_multi_setopt(impl->multi, CURLMOPT_TIMERDATA, impl.get());
    curl_multi_setopt(impl->multi, CURLMOPT_MAXCONNECTS,
                      static_cast<long>(options.max_connections));
    return std::unique_ptr<HttpEngine>(new HttpEngine(std::move(impl)));
}

void HttpEngine::set_options(const EngineOptions& options) {
    const bool new_trust = options.ca_file != impl_->options.ca_file;
    impl_->options = options;
    curl_multi_setopt(impl_->multi, CURLMOPT_MAXCONNECTS,
                      static_cast<long>(options.max_connections));
    if (new_trust) {
        ++impl_->generation; // handles remember the old file: those in use go when they are done
        impl_->idle.clear();
    }
}

int HttpEngine::wait_fd() const noexcept {
    return impl_->epoll_fd;
}

long HttpEngine::timeout_ms() const noexcept {
    if (!impl_->finished.empty()) {
        return 0;
    }
    if (!impl_->has_deadline) {
        return -1;
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(impl_->deadline - Clock::now());
    return static_cast<long>(std::max<std::chrono::milliseconds::rep>(left.count(), 0));
}

void HttpEngine::submit(const core::Uuid& id, core::Request&& request) {
    impl_->submit(id, std::move(request));
}

void HttpEngine::step() {
    impl_->step();
}

std::vector<Finished> HttpEngine::take_finished() {
    return std::exchange(impl_->finished, {});
}

std::size_t HttpEngine::running() const noexcept {
    return impl_->busy.size();
}

} // namespace outbox::net
