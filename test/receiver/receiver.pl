#!/usr/bin/env perl

=head1 NAME

receiver.pl - a scriptable HTTP/1.1 receiver that can misbehave in every way a test needs

=head1 SYNOPSIS

  receiver.pl [--port N] [--control-port N] [--rule JSON]... [--default JSON]
              [--store-body BYTES] [--seed N] [--idle-timeout-ms N] [--no-log]
              [--exit-with-parent] [--exit-on-stdin-eof]

It prints one line, C<port=40001 control=40002>, when it is ready, and ends on SIGTERM.
Perl tests use it through L<OutboxTest::Receiver>; everything else can use the control port with curl:

  curl -s localhost:40002/rules/add -d '{"path":"^/slow","delay_ms":[1,20]}'
  curl -s localhost:40002/rules/add -d '{"with":{"ce-type":"^poison$"},"status":500}'
  curl -s localhost:40002/log

=head1 RULES

A rule is a JSON object. The rules are a list, the first that matches answers; if none does, the
default answers (status 200, empty body, unless --default or /default said otherwise). A string may
be written C<{"base64":"..."}> wherever bytes are needed that JSON cannot hold.

=head2 Which requests

  name      shown in the log and in the counts (default: rule1, rule2, ...)
  method    regex
  path      regex, on the request target with its query
  with      {"header name": regex, ...}: some value of that header matches; null: the header is absent
  body_like regex
  nth       number or list: only the nth matching request(s), from 1
  skip      lets the first N matching requests pass by to the next rule
  times     used up after N uses
  every     only each Nth matching request
  per       header name: nth, skip, times and every count per value of this header. E.g.
            {"per":"ce-id","times":2,"status":500} fails every event twice
  chance    0..1: matches at random
  at        "request" (default): when the request is complete. "headers": as soon as its head is
            here; the body is left unread. "connect": when a connection is accepted, before anything
            is read (use with reset, close, half_close, raw or hang; only nth, skip, times, every
            and chance apply)

=head2 What happens

  delay_ms    number or [min, max] at random: before anything else happens
  status      number, or list to pick from at random (default 200)
  reason      reason phrase
  headers     {"name": value or [values]} or [["name","value"], ...] (duplicates allowed)
  raw_headers string put into the head as it is, with its own CRLFs
  location    adds Location; the default status becomes 302
  body        string
  body_size   a generated body of that many bytes instead
  chunked     true, or a list of strings: each is a chunk. Transfer-Encoding instead of Content-Length
  chunked_break "size" (garbage where the next size should be), "short" (the last chunk is cut, then
              closed), "no_end" (closed without the final chunk)
  cut         N: head with the full Content-Length, but only N bytes of the body, then closed
  raw         these bytes instead of an answer, then closed (with "keepalive":1: kept open)
  trickle_ms  the answer goes out one byte every N ms; "trickle_from":"body": the head at once
  keepalive   0: Connection: close, and closed after the answer
  hang        nothing (with cut: nothing more) is sent until /release or until the client leaves
  close       closed; without status, cut, raw: no answer. With status: a complete answer without
              Connection: close, then closed - a kept-alive connection dying under the client
  close_after_ms  closed that many ms after the answer
  reset       like close, but by RST (SO_LINGER 0)
  half_close  like close, but only our direction: FIN is sent, the client's is read on

=head1 CONTROL PORT

POST with a JSON body (or none), answers are JSON.

  GET  /                 {pid, port, control, mode}
  GET  /counts           requests, in_flight, max_in_flight, hung, connections (accepted), open_connections,
                         bytes_in, bytes_out, malformed, statuses {code: n}, rules {name: uses}
  GET  /log?since=I      {next, entries}: the entries with index >= I
  GET  /log?change=C&gen=G   entries that are new or changed since change C; &format=storable
  POST /clear            forgets the log and resets the counts (requests in flight stay in flight)
  POST /rules            {"rules": [...]}: replaces them all
  POST /rules/add        a rule or {"rules": [...], "first": true}: at the end, or at the front
  POST /rules/remove     {"name": ...}
  POST /rules/clear
  POST /default          what answers when no rule matches
  POST /release          {index: [..] or n, max: n, and an action as in a rule}: hung requests are answered now
  POST /mode             {"mode": ...}
                         accept     normal
                         refuse     nobody listens: connection refused (the port stays reserved)
                         no_read    connections are accepted, nothing is ever read, old ones included
                         no_accept  the kernel completes connections, nobody takes them
                         blackhole  connecting times out, as to a host behind a dropping firewall
  POST /close            {"which": "idle" or "all", "reset": 0/1}: closes client connections now
  POST /stop

=head1 LOG ENTRIES

  index        0, 1, 2, ...; never starts again
  conn, nth    connection id; which request on this connection (from 1)
  connected, arrival, answered, ended
               epoch microseconds: connection accepted; request complete; answer begun; its last byte
               handed to the kernel or the connection lost. ended is absent while it is in flight
  in_flight    requests in flight at arrival, this one included
  method, path, version, headers {lower-case name: [values]}, head (raw)
  body         bytes; absent if longer than --store-body (default 1 MB): body_start has the first 4 kB.
               In JSON: text if it is UTF-8, else body_base64
  body_length, body_sha256 (only when the body is absent)
  rule         name of the rule that answered, or "default"
  status       sent status
  outcome      answered, cut, raw, reset, closed, half_closed, hung, peer_closed (the client left first);
               absent while undecided
  key          the aggregate, if the headers (or a JSON body) of a known event format tell it
  overlaps     indexes of other requests with the same key that were in flight at arrival
  incomplete   1: answered before the body had arrived
  malformed    why the request is not valid HTTP/1.1

When the client shuts down its side while its request is in flight, the receiver takes the request for
given up. Requests are parsed strictly: control characters, bare LF, folded lines, two different lengths
and the like are malformed and answered 400.

=cut

use strict;
use warnings;

use Digest::SHA qw(sha256_hex);
use Encode ();
use Errno qw(EAGAIN EINTR EWOULDBLOCK EINPROGRESS);
use Getopt::Long;
use MIME::Base64 qw(decode_base64 encode_base64);
use Mojo::IOLoop;
use Mojo::JSON qw(decode_json encode_json);
use Socket qw(:DEFAULT IPPROTO_TCP TCP_NODELAY);
use Storable ();
use Time::HiRes ();

# As many descriptors as we are allowed, not the soft limit of 1024.
if (!$ENV{OUTBOX_RECEIVER_LIMITS})
{
    $ENV{OUTBOX_RECEIVER_LIMITS} = 1;
    no warnings 'exec';
    exec '/bin/sh', '-c', 'ulimit -n "$(ulimit -Hn)" 2>/dev/null; exec "$0" "$@"', $^X, $0, @ARGV;
}
delete $ENV{OUTBOX_RECEIVER_LIMITS};

use constant {
    READ_SIZE    => 262144,
    MAX_HEAD     => 1048576,
    MAX_PIPELINE => 1048576,
    TCP_INFO     => 11,
};

my %opt = (port => 0, 'control-port' => 0, 'store-body' => 1048576, 'idle-timeout-ms' => 0, rule => []);
GetOptions(
    \%opt,             'port=i',            'control-port=i', 'rule=s@',
    'default=s',       'store-body=i',      'seed=i',         'idle-timeout-ms=i',
    'no-log',          'exit-with-parent',  'exit-on-stdin-eof',
) or die "usage: perldoc $0\n";
srand $opt{seed} if defined $opt{seed};

my $reactor = Mojo::IOLoop->singleton->reactor;
$reactor->on(error => sub { warn "receiver: $_[1]" });
my $has_ev = $INC{'EV.pm'};

my $port;                                    # of the receiver, fixed after the first bind
my ($listener, $reserved, @fillers);         # listening socket; bound, not listening; see blackhole
my $mode = 'accept';
my $control_listener;
my %conns;                                   # id => connection
my $next_conn = 0;

my @rules;
my $next_rule = 1;
my $default;

# The log: entries in order of arrival; and an entry again in @changes whenever something about it changed, so
# that a client can keep a copy up to date cheaply. A clear makes a new generation.
my (@log, @changes, $gen, $next_index, %counts, %hung, %open_keys);
($gen, $next_index) = (1, 0);
my $in_flight = 0;

sub now_us { return int(Time::HiRes::time() * 1_000_000) }

sub reset_counts
{
    %counts = (
        requests  => 0, max_in_flight => $in_flight, connections => 0, bytes_in => 0,
        bytes_out => 0, malformed     => 0,          statuses    => {}, rule_uses => {});
    return;
}

sub after_ms
{
    my ($ms, $cb) = @_;
    EV::now_update() if $has_ev;
    return $reactor->timer($ms / 1000 => $cb);
}

# ---------------------------------------------------------------------------------------------------------
# Listening

sub bound_socket
{
    my ($want) = @_;
    socket(my $sock, PF_INET, SOCK_STREAM, IPPROTO_TCP) or die "socket: $!";
    setsockopt($sock, SOL_SOCKET, SO_REUSEADDR, 1);
    if (!bind($sock, pack_sockaddr_in($want, INADDR_LOOPBACK)))
    {
        close $sock;
        return;
    }
    $sock->blocking(0);
    return $sock;
}

# A port below the usual ephemeral range: while nobody listens on it, no outgoing connection can be given it.
sub free_port_socket
{
    my ($want) = @_;
    if ($want)
    {
        return bound_socket($want) // die "cannot bind port $want: $!\n";
    }
    for (1 .. 200)
    {
        my $sock = bound_socket(20000 + int(CORE::rand(12000)));
        return $sock if $sock;
    }
    return bound_socket(0) // die "no free port: $!\n";
}

sub sock_port { return (unpack_sockaddr_in(getsockname($_[0])))[0] }

sub rebind
{
    for my $try (1 .. 100)
    {
        my $sock = bound_socket($port);
        return $sock if $sock;
        Time::HiRes::sleep(0.01);    # connections of the old socket are being torn down
    }
    die "cannot bind port $port again: $!\n";
}

sub watch_listener
{
    my ($sock, $kind) = @_;
    $reactor->io($sock => sub { accept_all($sock, $kind) })->watch($sock, 1, 0);
    return;
}

sub drop_listener
{
    if ($listener)
    {
        $reactor->remove($listener);
        close $listener;
        undef $listener;
    }
    close $_ for @fillers;
    @fillers = ();
    return;
}

sub set_mode
{
    my ($new) = @_;
    die "unknown mode\n" unless defined $new && $new =~ /^(?:accept|refuse|no_read|no_accept|blackhole)$/;
    return if $new eq $mode && $listener;
    my $old = $mode;
    $mode = $new;

    if ($new eq 'refuse' || $new eq 'blackhole')
    {
        drop_listener();
        $reserved //= rebind();
    }
    elsif ($old eq 'blackhole')
    {
        drop_listener();
    }

    if ($new eq 'blackhole')
    {
        # With a full accept queue the kernel drops further SYNs.
        $listener = $reserved;
        undef $reserved;
        listen($listener, 0) or die "listen: $!";
        for (1 .. 8)
        {
            socket(my $s, PF_INET, SOCK_STREAM, IPPROTO_TCP) or last;
            $s->blocking(0);
            push @fillers, $s;
            connect($s, pack_sockaddr_in($port, INADDR_LOOPBACK));
            my $bits = '';
            vec($bits, fileno($s), 1) = 1;
            last unless select(undef, $bits, undef, 0.1);
        }
    }
    elsif ($new ne 'refuse')
    {
        if (!$listener)
        {
            $listener = $reserved // rebind();
            undef $reserved;
            listen($listener, 4096) or die "listen: $!";
        }
        $reactor->remove($listener);
        watch_listener($listener, 'data') if $new ne 'no_accept';
    }

    # Connections that are open follow the mode.
    for my $c (grep { $_->{kind} eq 'data' } values %conns)
    {
        if    ($new eq 'no_read') { pause_reading($c) }
        elsif ($old eq 'no_read') { resume_reading($c) }
    }
    return;
}

sub accept_all
{
    my ($sock, $kind) = @_;
    for (1 .. 64)
    {
        my $peer = accept(my $s, $sock) or return;
        $s->blocking(0);
        setsockopt($s, IPPROTO_TCP, TCP_NODELAY, 1);
        my $c = {
            id   => $next_conn++,  sock => $s,      kind => $kind, in => '', out => '', state => 'head',
            n    => 0,             opened => now_us(), reading => 1, timers => {},
        };
        $conns{ $c->{id} } = $c;
        $reactor->io($s => sub { $_[1] ? conn_write($c) : conn_read($c) })->watch($s, 1, 0);
        next if $kind eq 'control';

        $counts{connections}++;
        if (my $rule = find_rule('connect', $c, {}))
        {
            pause_reading($c);
            $c->{state} = 'answer';
            start_action($c, undef, $rule);
        }
        elsif ($mode eq 'no_read')
        {
            pause_reading($c);
        }
        else
        {
            idle_timer($c);
        }
    }
    return;
}

# ---------------------------------------------------------------------------------------------------------
# Connections

sub watch
{
    my ($c) = @_;
    $reactor->watch($c->{sock}, $c->{reading}, length $c->{out} ? 1 : 0);
    return;
}

sub pause_reading
{
    my ($c) = @_;
    $c->{reading} = 0;
    watch($c);
    return;
}

sub resume_reading
{
    my ($c) = @_;
    return if $c->{reading};
    $c->{reading} = 1;
    watch($c);
    return;
}

# The peer's FIN or RST has arrived, even if unread bytes stand before it.
sub peer_gone
{
    my ($c) = @_;
    my $info = getsockopt($c->{sock}, IPPROTO_TCP, TCP_INFO) or return 1;
    my $state = unpack 'C', $info;
    return $state != 1 && $state != 4 && $state != 5;    # ESTABLISHED, FIN_WAIT1, FIN_WAIT2
}

sub conn_read
{
    my ($c) = @_;
    my $got = 0;
    for (1 .. 8)
    {
        my $n = sysread($c->{sock}, $c->{in}, READ_SIZE, length $c->{in});
        if (!defined $n)
        {
            return if $! == EAGAIN || $! == EINTR || $! == EWOULDBLOCK;
            return conn_close($c, 'peer_closed');
        }
        $c->{read_at} = now_us();
        if ($n == 0)
        {
            last if $got;    # first what came before the end; we are called again
            return conn_close($c, 'peer_closed');
        }
        $got = 1;
        $counts{bytes_in} += $n if $c->{kind} eq 'data';
        $c->{in} = '' if $c->{state} eq 'discard';
        last if $n < READ_SIZE;
    }
    if ($c->{state} eq 'answer')
    {
        pause_reading($c) if length $c->{in} > MAX_PIPELINE;
        return;
    }
    conn_parse($c);
    return;
}

sub conn_write
{
    my ($c) = @_;
    my $n = syswrite($c->{sock}, $c->{out});
    if (!defined $n)
    {
        return if $! == EAGAIN || $! == EINTR || $! == EWOULDBLOCK;
        return conn_close($c, 'peer_closed');
    }
    $counts{bytes_out} += $n if $c->{kind} eq 'data';
    substr($c->{out}, 0, $n, '');
    return if length $c->{out};
    watch($c);
    my $cb = delete $c->{drained};
    $cb->() if $cb;
    return;
}

# Sends bytes; cb is called when the kernel has the last of them. The usual answer goes out at once.
sub conn_send
{
    my ($c, $bytes, $cb) = @_;
    my $n = length $c->{out} ? 0 : syswrite($c->{sock}, $bytes);
    if (!defined $n)
    {
        return conn_close($c, 'peer_closed') unless $! == EAGAIN || $! == EINTR || $! == EWOULDBLOCK;
        $n = 0;
    }
    $counts{bytes_out} += $n if $c->{kind} eq 'data';
    return $cb->() if $n == length $bytes;
    $c->{out} .= substr($bytes, $n);
    $c->{drained} = $cb;
    watch($c);
    return;
}

sub conn_close
{
    my ($c, $outcome) = @_;
    return unless delete $conns{ $c->{id} };
    $reactor->remove($_) for values %{ $c->{timers} };
    $c->{timers} = {};
    $reactor->remove($c->{sock});
    close $c->{sock};
    $c->{closed} = 1;
    delete $c->{drained};
    if (my $e = delete $c->{entry})
    {
        end_entry($e, $outcome);
    }
    return;
}

sub conn_reset
{
    my ($c, $outcome) = @_;
    setsockopt($c->{sock}, SOL_SOCKET, SO_LINGER, pack('ii', 1, 0));
    return conn_close($c, $outcome);
}

sub conn_timer
{
    my ($c, $name, $ms, $cb) = @_;
    my $old = delete $c->{timers}{$name};
    $reactor->remove($old) if $old;
    $c->{timers}{$name} = after_ms($ms, sub { delete $c->{timers}{$name}; $cb->() });
    return;
}

sub idle_timer
{
    my ($c) = @_;
    return unless $opt{'idle-timeout-ms'};
    conn_timer($c, 'idle', $opt{'idle-timeout-ms'}, sub { conn_close($c, 'closed') if !$c->{entry} });
    return;
}

# ---------------------------------------------------------------------------------------------------------
# Parsing

my $TOKEN = qr/[!#\$%&'*+.^_`|~0-9A-Za-z-]+/;

sub parse_head
{
    my ($head) = @_;
    my @lines = split /\r\n/, $head, -1;
    my %req = (head => $head, headers => {}, method => '', path => '', version => '');
    my $line = shift @lines;
    if (!defined $line || $line !~ /\A($TOKEN) ([\x21-\x7e]+) HTTP\/(1\.[01])\z/)
    {
        $req{malformed} = 'request line';
        return \%req;
    }
    @req{qw(method path version)} = ($1, $2, $3);
    my $h = $req{headers};
    for (@lines)
    {
        if (!/\A($TOKEN):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*\z/)
        {
            $req{malformed} = 'header line';
            return \%req;
        }
        push @{ $h->{ lc $1 } }, $2;
    }
    my $te = $h->{'transfer-encoding'};
    my $cl = $h->{'content-length'};
    if ($te)
    {
        if ($cl || @$te > 1 || lc $te->[0] ne 'chunked') { $req{malformed} = 'transfer-encoding' }
        else                                             { $req{chunked}   = 1 }
    }
    elsif ($cl)
    {
        if (@$cl > 1 || $cl->[0] !~ /\A[0-9]{1,15}\z/) { $req{malformed} = 'content-length' }
        else                                           { $req{length}    = int "$cl->[0]" }
    }
    if (!$req{malformed} && $req{version} eq '1.1' && @{ $h->{host} // [] } != 1)
    {
        $req{malformed} = 'host';
    }
    return \%req;
}

sub first_header
{
    my ($req, $name) = @_;
    my $values = $req->{headers}{$name};
    return $values ? lc $values->[0] : '';
}

sub conn_parse
{
    my ($c) = @_;
    return if $c->{parsing};    # an answer given at once comes back here: the loop below goes on
    local $c->{parsing} = 1;

    while (!$c->{closed})
    {
        if ($c->{state} eq 'head')
        {
            $c->{in} =~ s/\A(?:\r\n)+//;
            my $end = index $c->{in}, "\r\n\r\n";
            if ($end < 0)
            {
                return if length $c->{in} <= MAX_HEAD;
                $end = MAX_HEAD;
            }
            my $req = parse_head(substr $c->{in}, 0, $end);
            substr($c->{in}, 0, $end + 4, '');
            $c->{req} = $req;
            $c->{n}++;
            if ($req->{malformed})
            {
                answer_malformed($c);
                return;
            }
            $c->{state} = 'body';
            if ($c->{kind} eq 'data' && (my $rule = find_rule('headers', $c, $req)))
            {
                $req->{incomplete} = $req->{chunked} || $req->{length} ? 1 : 0;
                $req->{body} = $req->{incomplete} ? $c->{in} : '';
                pause_reading($c) if $req->{incomplete};
                request_arrived($c, $req, $rule);
                next;
            }
            if (first_header($req, 'expect') eq '100-continue'
                && ($req->{chunked} || ($req->{length} // 0) > length $c->{in}))
            {
                conn_send($c, "HTTP/1.1 100 Continue\r\n\r\n", sub { });
                next if $c->{closed};
            }
        }
        if ($c->{state} eq 'body')
        {
            my $req = $c->{req};
            if ($req->{chunked})
            {
                my $done = parse_chunks($c, $req);
                return if !$done;
                next   if $req->{malformed};
            }
            else
            {
                my $length = $req->{length} // 0;
                return if length $c->{in} < $length;
                $req->{body} = $length ? substr($c->{in}, 0, $length, '') : '';
            }
            if   ($c->{kind} eq 'control') { control_request($c, $req) }
            else                           { request_arrived($c, $req, find_rule('request', $c, $req)) }
            next;
        }
        return;    # an answer is on its way, or the rest is discarded
    }
    return;
}

# True if the body is complete, or malformed.
sub parse_chunks
{
    my ($c, $req) = @_;
    $req->{body} //= '';
    while (1)
    {
        my $eol = index $c->{in}, "\r\n";
        return 0 if $eol < 0 && length $c->{in} < 1024;
        my $line = $eol < 0 ? '' : substr $c->{in}, 0, $eol;
        if ($line !~ /\A([0-9A-Fa-f]{1,8})(?:[ \t]*;.*)?\z/)
        {
            $req->{malformed} = 'chunk size';
            answer_malformed($c);
            return 1;
        }
        my $size = hex $1;
        if ($size == 0)
        {
            my $end = index $c->{in}, "\r\n\r\n", $eol;    # trailers are skipped
            return 0 if $end < 0;
            substr($c->{in}, 0, $end + 4, '');
            return 1;
        }
        return 0 if length $c->{in} < $eol + 2 + $size + 2;
        $req->{body} .= substr $c->{in}, $eol + 2, $size;
        substr($c->{in}, 0, $eol + 2 + $size + 2, '');
    }
}

# ---------------------------------------------------------------------------------------------------------
# Rules

sub compile_rule
{
    my ($spec) = @_;
    my %r = %{ unwrap($spec) };
    $r{at} //= 'request';
    die "at: connect, headers or request\n" unless $r{at} =~ /^(?:connect|headers|request)$/;
    $r{name} //= 'rule' . $next_rule++;
    for (qw(method path body_like))
    {
        $r{$_} = qr/$r{$_}/ if defined $r{$_};
    }
    $r{with} = { map { lc $_ => defined $r{with}{$_} ? qr/$r{with}{$_}/ : undef } keys %{ $r{with} } } if $r{with};
    $r{nth} = { map { $_ => 1 } ref $r{nth} ? @{ $r{nth} } : $r{nth} } if defined $r{nth};
    $r{per} = lc $r{per} if defined $r{per};
    $r{hits} = {};

    # The bytes of an answer that is always the same are built once.
    my %fixed = map { $_ => 1 } qw(at body body_like body_size chance every first headers hits location method name nth
      path per raw_headers reason rules skip status times with);
    $r{fixed} = 1 if !ref $r{status} && !grep { !$fixed{$_} } keys %r;
    return \%r;
}

# Turns {"base64": ...} and characters into bytes.
sub unwrap
{
    my ($v) = @_;
    if (ref $v eq 'HASH')
    {
        return decode_base64($v->{base64}) if keys %$v == 1 && exists $v->{base64};
        return { map { $_ => unwrap($v->{$_}) } keys %$v };
    }
    return [ map { unwrap($_) } @$v ] if ref $v eq 'ARRAY';
    return $v ? 1 : 0 if ref $v;
    return $v if !defined $v;
    utf8::encode($v) if $v =~ /[^\x00-\x7f]/;
    return $v;
}

sub find_rule
{
    my ($at, $c, $req) = @_;
  RULE: for my $r (@rules)
    {
        next if $r->{at} ne $at;
        if ($at ne 'connect')
        {
            next if $r->{method} && $req->{method} !~ $r->{method};
            next if $r->{path}   && $req->{path}   !~ $r->{path};
            if (my $want = $r->{with})
            {
                while (my ($name, $re) = each %$want)
                {
                    my $values = $req->{headers}{$name};
                    next if defined $re ? (grep { $_ =~ $re } @{ $values // [] }) : !$values;
                    keys %$want;    # resets the iterator
                    next RULE;
                }
            }
            next if $r->{body_like} && ($req->{body} // '') !~ $r->{body_like};
        }
        next if defined $r->{chance} && rand() >= $r->{chance};
        my $per = defined $r->{per} ? first_header($req, $r->{per}) : '';
        my $n = ++$r->{hits}{$per};
        if (defined $r->{skip})
        {
            next if $n <= $r->{skip};
            $n -= $r->{skip};
        }
        next if $r->{nth}           && !$r->{nth}{$n};
        next if defined $r->{every} && $n % $r->{every};
        next if defined $r->{times} && ($r->{used}{$per} // 0) >= $r->{times};
        $r->{used}{$per}++;
        $counts{rule_uses}{ $r->{name} }++;
        return $r;
    }
    return $at eq 'request' ? $default : undef;
}

# ---------------------------------------------------------------------------------------------------------
# The log

# What must not be in flight twice at once: the aggregate of an event.
sub key_of
{
    my ($req) = @_;
    my $h = $req->{headers};
    if (my $subject = $h->{'ce-subject'})
    {
        return join "\0", $subject->[0], $h->{'ce-partitionkey'} ? $h->{'ce-partitionkey'}[0] : ();
    }
    if (my $id = $h->{'outbox-aggregate-id'})
    {
        return join "\0", $h->{'outbox-aggregate-type'} ? $h->{'outbox-aggregate-type'}[0] : '', $id->[0];
    }
    if (($req->{body} // '') =~ /\A\s*\{\s*"id"/)
    {
        my ($type) = $req->{body} =~ /"aggregate_type"\s*:\s*"((?:[^"\\]|\\.)*)"/;
        my ($id)   = $req->{body} =~ /"aggregate_id"\s*:\s*"((?:[^"\\]|\\.)*)"/;
        return "$type\0$id" if defined $type && defined $id;
    }
    return;
}

sub request_arrived
{
    my ($c, $req, $rule) = @_;
    my $body = $req->{body} // '';
    my %e = (
        index   => $next_index++,   conn    => $c->{id},        nth     => $c->{n},
        connected => $c->{opened},  arrival => $c->{read_at} // now_us(),
        method  => $req->{method},  path    => $req->{path},    version => $req->{version},
        headers => $req->{headers}, head    => $req->{head},    body_length => length $body,
        rule    => $rule->{name},
    );
    if ($c->{timers}{idle}) { $reactor->remove(delete $c->{timers}{idle}) }
    $e{malformed}  = $req->{malformed} if $req->{malformed};
    $e{incomplete} = 1                 if $req->{incomplete};
    if (length $body <= $opt{'store-body'})
    {
        $e{body} = $body;
    }
    else
    {
        $e{body_sha256} = sha256_hex($body);
        $e{body_start}  = substr $body, 0, 4096;
    }
    # Pipelined requests are read together, but this one only arrives once its predecessor is answered.
    $e{arrival} = $c->{last_end} if $c->{last_end} && $c->{last_end} > $e{arrival};

    my $key = key_of($req);
    if (defined $key)
    {
        $e{key} = $key;
        my $others = $open_keys{$key} //= {};
        # One whose client has left, which we have not noticed yet, is no longer in flight.
        for my $other (my @copy = values %$others)
        {
            conn_close($other->[0], 'peer_closed') if peer_gone($other->[0]);
        }
        $others = $open_keys{$key} //= {};
        $e{overlaps} = [ sort { $a <=> $b } keys %$others ] if %$others;
        $others->{ $e{index} } = [$c];
    }

    $counts{requests}++;
    $e{in_flight} = ++$in_flight;
    $counts{max_in_flight} = $in_flight if $in_flight > $counts{max_in_flight};
    my $entry = \%e;
    if (!$opt{'no-log'})
    {
        push @log,     $entry;
        push @changes, $entry;
    }
    $c->{entry}   = $entry;
    $c->{state}   = 'answer';
    delete $c->{req}{body};
    start_action($c, $entry, $rule);
    return;
}

sub end_entry
{
    my ($e, $outcome) = @_;
    $e->{outcome} = $outcome if $outcome;
    $e->{ended}   = now_us();
    $in_flight--;
    delete $hung{ $e->{index} };
    if (defined $e->{key} && (my $others = $open_keys{ $e->{key} }))
    {
        delete $others->{ $e->{index} };
        delete $open_keys{ $e->{key} } if !%$others;
    }
    $counts{statuses}{ $e->{status} }++ if defined $e->{status} && $outcome eq 'answered';
    push @changes, $e if !$opt{'no-log'};
    return;
}

# ---------------------------------------------------------------------------------------------------------
# Answers

my %REASON = (
    200 => 'OK',          201 => 'Created',           202 => 'Accepted',    204 => 'No Content',
    301 => 'Moved Permanently', 302 => 'Found', 303 => 'See Other', 307 => 'Temporary Redirect',
    308 => 'Permanent Redirect', 400 => 'Bad Request', 401 => 'Unauthorized', 403 => 'Forbidden',
    404 => 'Not Found',   408 => 'Request Timeout',   409 => 'Conflict',    410 => 'Gone',
    413 => 'Content Too Large', 422 => 'Unprocessable Content', 429 => 'Too Many Requests',
    500 => 'Internal Server Error', 501 => 'Not Implemented', 502 => 'Bad Gateway',
    503 => 'Service Unavailable', 504 => 'Gateway Timeout',
);

# A malformed request is logged like any other.
sub answer_malformed
{
    my ($c) = @_;
    if ($c->{kind} eq 'control')
    {
        conn_send($c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            sub { conn_close($c) });
        return;
    }
    $counts{malformed}++;
    request_arrived($c, $c->{req}, { name => 'malformed', status => 400, keepalive => 0 });
    return;
}

sub start_action
{
    my ($c, $e, $rule) = @_;
    my $delay = $rule->{delay_ms};
    $delay = $delay->[0] + rand() * ($delay->[1] - $delay->[0]) if ref $delay;
    if ($delay)
    {
        conn_timer($c, 'delay', $delay, sub { act($c, $e, $rule) });
    }
    else
    {
        act($c, $e, $rule);
    }
    return;
}

sub act
{
    my ($c, $e, $rule) = @_;
    my $answers = grep { defined $rule->{$_} } qw(status cut raw body body_size location chunked);
    my $ends    = $rule->{hang} || $rule->{close} || $rule->{reset} || $rule->{half_close};

    if ($ends && !$answers)
    {
        $e->{answered} = now_us() if $e && !$rule->{hang};
        return finish($c, $e, $rule, '');
    }

    if ($rule->{fixed} && $e && !ends_after($c, $e, $rule))
    {
        $rule->{fixed_answer} //= [ join('', (build_answer($c, $e, $rule))[ 0, 1 ]), $e->{status} ];
        $e->{answered} = now_us();
        $e->{status}   = $rule->{fixed_answer}[1];
        return conn_send($c, $rule->{fixed_answer}[0], sub { finish($c, $e, $rule, 'answered') });
    }

    my ($head, $body, $outcome) = build_answer($c, $e, $rule);
    if ($e)
    {
        $e->{answered} = now_us();
        if ($outcome ne 'answered' || $rule->{hang}) { $e->{outcome} = $outcome }
    }
    if (my $ms = $rule->{trickle_ms})
    {
        my $rest = $head . $body;
        my $first = ($rule->{trickle_from} // '') eq 'body' ? length $head : 0;
        push @changes, $e if $e && !$opt{'no-log'};
        trickle($c, $rest, $first, $ms, sub { finish($c, $e, $rule, $outcome) });
        return;
    }
    conn_send($c, $head . $body, sub { finish($c, $e, $rule, $outcome) });
    return;
}

sub trickle
{
    my ($c, $bytes, $first, $ms, $cb) = @_;
    my $pos = $first;
    my $step;
    $step = sub {
        if ($c->{closed}) { undef $step; return }
        if ($pos >= length $bytes) { undef $step; return $cb->() }
        conn_send($c, substr($bytes, $pos++, 1), sub { });
        conn_timer($c, 'trickle', $ms, $step) if !$c->{closed};
    };
    if   ($first) { conn_send($c, substr($bytes, 0, $first), $step) }
    else          { $step->() }
    return;
}

sub build_answer
{
    my ($c, $e, $rule) = @_;
    return ('', $rule->{raw}, 'raw') if defined $rule->{raw};

    my $status = $rule->{status} // ($rule->{location} ? 302 : 200);
    $status = $status->[ int rand @$status ] if ref $status;
    my $outcome = 'answered';
    my $body    = $rule->{body} // '';
    $body = substr('0123456789abcdef' x (1 + $rule->{body_size} / 16), 0, $rule->{body_size}) if $rule->{body_size};
    my @headers;
    if (my $h = $rule->{headers})
    {
        @headers = ref $h eq 'ARRAY'
          ? @$h
          : map { my $n = $_; map { [ $n, $_ ] } ref $h->{$n} ? @{ $h->{$n} } : $h->{$n} } sort keys %$h;
    }
    push @headers, [ 'Location', $rule->{location} ] if defined $rule->{location};
    if ($e)
    {
        $e->{status} = $status;
        push @headers, [ 'Connection', 'close' ] if ends_after($c, $e, $rule) eq 'announced';
    }
    if ($rule->{chunked} || $rule->{chunked_break})
    {
        push @headers, [ 'Transfer-Encoding', 'chunked' ];
        my @chunks = ref $rule->{chunked} ? @{ $rule->{chunked} } : length $body ? ($body) : ();
        $body = join '', map { sprintf "%x\r\n%s\r\n", length $_, $_ } grep { length } @chunks;
        my $break = $rule->{chunked_break} // '';
        if    ($break eq 'size')   { $body .= "zz\r\nnot a chunk\r\n" }
        elsif ($break eq 'short')  { $body .= "400\r\nshort" }
        elsif ($break eq 'no_end') { }
        else                       { $body .= "0\r\n\r\n" }
        $outcome = 'cut' if $break;
    }
    elsif ($status >= 200 && $status != 204 && $status != 304)
    {
        push @headers, [ 'Content-Length', length $body ]
          if !grep { lc $_->[0] eq 'content-length' } @headers;
    }
    else
    {
        $body = '';
    }
    if (defined $rule->{cut})
    {
        $body = 'x' x ($rule->{cut} + 100) if length $body <= $rule->{cut};
        ($_->[1] = length $body) for grep { $_->[0] eq 'Content-Length' } @headers;
        $body    = substr $body, 0, $rule->{cut};
        $outcome = 'cut';
    }
    my $head = sprintf "HTTP/1.1 %d %s\r\n", $status, $rule->{reason} // $REASON{$status} // 'Status';
    $head .= "$_->[0]: $_->[1]\r\n" for @headers;
    $head .= $rule->{raw_headers} if defined $rule->{raw_headers};
    return ($head . "\r\n", $body, $outcome);
}

# Whether the connection ends after the answer: '', 'announced' (with Connection: close) or 'silent'.
sub ends_after
{
    my ($c, $e, $rule) = @_;
    return 'silent' if $rule->{close} || $rule->{reset} || $rule->{half_close} || defined $rule->{cut} || $rule->{chunked_break};
    return defined $rule->{keepalive} && $rule->{keepalive} ? '' : 'silent' if defined $rule->{raw};
    return 'announced' if defined $rule->{keepalive} && !$rule->{keepalive};
    return 'announced' if $e && ($e->{incomplete} || $e->{version} eq '1.0'
        || first_header($e, 'connection') eq 'close');
    return '';
}

# The bytes are out: how it goes on with the connection. outcome '' = nothing was sent.
sub finish
{
    my ($c, $e, $rule, $outcome) = @_;
    return if $c->{closed};
    if ($rule->{hang})
    {
        if ($e)
        {
            $e->{outcome} = 'hung';
            $hung{ $e->{index} } = [ $c, $e ];
            push @changes, $e if !$opt{'no-log'};
        }
        return;
    }
    return conn_reset($c, $outcome || 'reset') if $rule->{reset};
    my $ends = ends_after($c, $e, $rule);
    if (!$ends && $e)
    {
        delete $c->{entry};
        end_entry($e, $outcome);
        $c->{last_end} = $e->{ended};
        $c->{state}    = 'head';
        conn_timer($c, 'idle', $rule->{close_after_ms}, sub { conn_close($c, 'closed') if !$c->{entry} })
          if defined $rule->{close_after_ms};
        idle_timer($c) if !$c->{timers}{idle};
        resume_reading($c) if $mode ne 'no_read';
        conn_parse($c) if length $c->{in};
        return;
    }
    if (!$rule->{half_close} && !($e && $outcome && ($e->{incomplete} || $e->{malformed})))
    {
        return conn_close($c, $outcome || 'closed');
    }

    # Our side ends, the peer's is read on: asked for, or because unread bytes at close() would turn into an
    # RST that can overtake the answer.
    if ($e)
    {
        delete $c->{entry};
        end_entry($e, $outcome || 'half_closed');
    }
    shutdown $c->{sock}, 1;
    $c->{state} = 'discard';
    $c->{in}    = '';
    conn_timer($c, 'linger', 5000, sub { conn_close($c) }) if !$rule->{half_close};
    resume_reading($c);
    return;
}

# ---------------------------------------------------------------------------------------------------------
# Control

sub public_entry
{
    my ($e) = @_;
    my %e = %$e;
    for my $name (qw(body body_start head key))
    {
        next if !defined $e{$name};
        my $text = eval { Encode::decode('UTF-8', my $copy = $e{$name}, Encode::FB_CROAK) };
        if   (defined $text) { $e{$name} = $text }
        else                 { $e{"${name}_base64"} = encode_base64(delete $e{$name}, '') }
    }
    return \%e;
}

my %control = (
    '/' => sub { return { pid => $$, port => $port, control => sock_port($control_listener), mode => $mode } },
    '/counts' => sub {
        my %c = %counts;
        $c{in_flight}        = $in_flight;
        $c{hung}             = keys %hung;
        $c{open_connections} = grep { $_->{kind} eq 'data' } values %conns;
        $c{rules}            = delete $c{rule_uses};
        $c{mode}             = $mode;
        return \%c;
    },
    '/log' => sub {
        my (undef, $q) = @_;
        my @entries;
        if (defined $q->{change})
        {
            my $from = ($q->{gen} // 0) == $gen ? $q->{change} : 0;
            my %seen;
            @entries = grep { !$seen{ $_->{index} }++ } @changes[ $from .. $#changes ];
        }
        else
        {
            my $since = $q->{since} // 0;
            @entries = grep { $_->{index} >= $since } @log;
        }
        my $storable = ($q->{format} // '') eq 'storable';
        return {
            gen     => $gen,
            change  => scalar @changes,
            next    => $next_index,
            entries => $storable ? \@entries : [ map { public_entry($_) } @entries ],
        };
    },
    '/clear' => sub {
        @log = @changes = ();
        $gen++;
        reset_counts();
        return { gen => $gen, next => $next_index };
    },
    '/rules' => sub {
        my ($in) = @_;
        @rules = map { compile_rule($_) } @{ $in->{rules} // [] } if defined $in->{rules};
        return { rules => [ map { $_->{name} } @rules ] };
    },
    '/rules/add' => sub {
        my ($in) = @_;
        my @new = map { compile_rule($_) } $in->{rules} ? @{ $in->{rules} } : $in;
        if   ($in->{first}) { unshift @rules, @new }
        else                { push @rules, @new }
        return { rules => [ map { $_->{name} } @new ] };
    },
    '/rules/remove' => sub {
        my ($in) = @_;
        my $before = @rules;
        @rules = grep { $_->{name} ne $in->{name} } @rules;
        return { removed => $before - @rules };
    },
    '/rules/clear' => sub { @rules = (); return {} },
    '/default'     => sub { $default = compile_rule({ name => 'default', %{ $_[0] } }); return {} },
    '/release'     => sub {
        my ($in) = @_;
        my @which = defined $in->{index} ? (ref $in->{index} ? @{ $in->{index} } : $in->{index}) : sort { $a <=> $b } keys %hung;
        @which = @which[ 0 .. $in->{max} - 1 ] if defined $in->{max} && $in->{max} < @which;
        my $action = compile_rule({ name => 'release', %$in });
        my $n = 0;
        for my $i (@which)
        {
            my $h = delete $hung{$i} or next;
            $n++;
            delete $h->[1]{outcome};
            act($h->[0], $h->[1], $action);
        }
        return { released => $n };
    },
    '/mode'  => sub { set_mode($_[0]{mode}); return { mode => $mode } },
    '/close' => sub {
        my ($in) = @_;
        my $which = $in->{which} // 'all';
        my $n = 0;
        for my $c (grep { $_->{kind} eq 'data' } values %conns)
        {
            next if $which eq 'idle' && $c->{entry};
            $n++;
            if   ($in->{reset}) { conn_reset($c, 'reset') }
            else                { conn_close($c, 'closed') }
        }
        return { closed => $n };
    },
    '/stop' => sub { after_ms(10, sub { exit 0 }); return {} },
);

sub control_request
{
    my ($c, $req) = @_;
    $c->{state} = 'answer';
    my ($path, $query) = split /\?/, $req->{path}, 2;
    my %q = map { my ($k, $v) = split /=/, $_, 2; $k => $v // '' } split /&/, $query // '';
    my ($status, $type, $out) = (200, 'application/json');
    my $handler = $control{$path};
    if (!$handler)
    {
        ($status, $out) = (404, encode_json({ error => "no such command: $path" }));
    }
    else
    {
        my $result = eval {
            my $in = length $req->{body} ? decode_json($req->{body}) : {};
            die "a JSON object is expected\n" if ref $in ne 'HASH';
            $handler->($in, \%q);
        };
        if (!$result)
        {
            ($status, $out) = (400, encode_json({ error => "$@" }));
        }
        elsif (($q{format} // '') eq 'storable')
        {
            ($type, $out) = ('application/x-storable', Storable::nfreeze($result));
        }
        else
        {
            $out = encode_json($result) . "\n";
        }
    }
    my $close = first_header($req, 'connection') eq 'close';
    conn_send(
        $c,
        sprintf("HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\n%s\r\n", $status, $type, length $out,
            $close ? "Connection: close\r\n" : '') . $out,
        sub {
            return conn_close($c) if $close;
            $c->{state} = 'head';
            conn_parse($c) if length $c->{in};
        });
    return;
}

# ---------------------------------------------------------------------------------------------------------
# Start

$SIG{PIPE} = 'IGNORE';
$SIG{$_} = sub { exit 0 } for qw(TERM INT HUP);

reset_counts();
$default = compile_rule({ name => 'default', $opt{default} ? %{ decode_json($opt{default}) } : () });
@rules = map { compile_rule(decode_json($_)) } @{ $opt{rule} };

$listener = free_port_socket($opt{port});
$port     = sock_port($listener);
listen($listener, 4096) or die "listen: $!";
watch_listener($listener, 'data');

$control_listener = free_port_socket($opt{'control-port'});
listen($control_listener, 64) or die "listen: $!";
watch_listener($control_listener, 'control');

if ($opt{'exit-with-parent'})
{
    my $parent = getppid();
    exit 0 if $parent == 1;
    $reactor->recurring(0.2 => sub { exit 0 if getppid() != $parent });
}
if ($opt{'exit-on-stdin-eof'})
{
    STDIN->blocking(0);
    $reactor->io(
        \*STDIN => sub {
            my $n = sysread STDIN, my $buf, 4096;
            exit 0 if defined $n && $n == 0;
        })->watch(\*STDIN, 1, 0);
}

# Connections that are not read cannot tell us that the client has left.
$reactor->recurring(
    0.1 => sub {
        for my $c (values %conns)
        {
            conn_close($c, 'peer_closed') if !$c->{reading} && peer_gone($c);
        }
    });

# Signals wake the loop even when nothing happens.
$reactor->recurring(0.2 => sub { });

$| = 1;
print 'port=', $port, ' control=', sock_port($control_listener), "\n";
$reactor->start;
