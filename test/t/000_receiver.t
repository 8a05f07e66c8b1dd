# The scriptable receiver itself, without PostgreSQL: every other test believes what it says.

use strict;
use warnings;

use Errno qw(ECONNRESET EPIPE);
use HTTP::Tiny;
use IO::Socket::INET;
use JSON::PP qw(decode_json);
use Test::More;
use Time::HiRes ();

use OutboxTest::Receiver;
use OutboxTest::Wait;

my $r = OutboxTest::Receiver->start(seed => 1);
$SIG{PIPE} = 'IGNORE';

sub now { return Time::HiRes::clock_gettime(Time::HiRes::CLOCK_MONOTONIC()) }

sub fresh
{
    $r->clear_rules;
    $r->clear_log;
    return;
}

sub connection
{
    return IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $r->port, Timeout => wait_seconds(10));
}

sub request
{
    my ($path, $body, @headers) = @_;
    $body //= '';
    return join "\r\n", "POST $path HTTP/1.1", 'Host: x', 'Content-Length: ' . length $body, @headers, '', $body;
}

# Reads until the end, or until the answer is complete by its Content-Length (or $opt{length}), or nothing has come
# for $opt{quiet} seconds. Says how it ended: eof, reset, complete, quiet.
sub receive
{
    my ($socket, %opt) = @_;
    my ($data, $end) = ('', undef);
    my $deadline = now() + ($opt{quiet} // wait_seconds(20));
    while (!$end)
    {
        vec(my $bits = '', fileno $socket, 1) = 1;
        my $left = $deadline - now();
        if ($left <= 0 || !select $bits, undef, undef, $left) { $end = 'quiet'; last }
        my $n = sysread $socket, $data, 65536, length $data;
        if    (!defined $n) { $end = $! == ECONNRESET || $! == EPIPE ? 'reset' : "error $!" }
        elsif ($n == 0)     { $end = 'eof' }
        elsif ($opt{length} && length $data >= $opt{length}) { $end = 'complete' }
        elsif (!$opt{to_end} && $data =~ /\A(.*?\r\n\r\n)/s)
        {
            my $head = $1;
            my ($length) = $head =~ /^content-length: ([0-9]+)/mi;
            $end = 'complete' if defined $length && length($data) >= length($head) + $length;
        }
    }
    return { data => $data, end => $end, body => $data =~ s/\A.*?\r\n\r\n//sr, status => $data =~ /\AHTTP\/1.1 ([0-9]+)/ ? $1 : undef };
}

sub ask
{
    my ($path, $body, $headers, %opt) = @_;
    my $socket = connection() or return { end => 'refused' };
    print {$socket} request($path, $body, @{ $headers // [] });
    return receive($socket, %opt);
}

sub ce
{
    my ($id, $aggregate, $seq) = @_;
    return [ "ce-id: $id", "ce-subject: $aggregate", 'ce-type: t', "ce-sequence: $seq", 'ce-partitionkey: ' . $aggregate =~ s{.*/}{}r ];
}

subtest 'the default answer and the log' => sub {
    fresh();
    my $before = int(Time::HiRes::time() * 1e6);
    my $socket = connection();
    print {$socket} request('/a?b=c', '{"x":"y"}', 'X-Two: 1', 'x-two: 2', 'X-Empty:');
    my $answer = receive($socket);
    is($answer->{data}, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", 'answer');
    print {$socket} request('/second');
    receive($socket);
    ask('/third');
    my $after = int(Time::HiRes::time() * 1e6);

    my @log = $r->log;
    is(@log, 3, 'three requests');
    my $e = $log[0];
    is("@$e{qw(method path version body body_length rule status outcome nth in_flight)}",
        'POST /a?b=c 1.1 {"x":"y"} 9 default 200 answered 1 1', 'entry');
    is_deeply($e->{headers},
        { host => ['x'], 'content-length' => ['9'], 'x-two' => [ '1', '2' ], 'x-empty' => [''] }, 'headers');
    like($e->{head}, qr/^X-Two: 1\r\nx-two: 2\r$/m, 'raw head');
    cmp_ok($before, '<=', $e->{connected}, 'microseconds: connected');
    cmp_ok($e->{connected}, '<=', $e->{arrival},  'arrival');
    cmp_ok($e->{arrival},   '<=', $e->{answered}, 'answered');
    cmp_ok($e->{answered},  '<=', $e->{ended},    'ended');
    cmp_ok($e->{ended},     '<=', $after,         'now');
    is($log[1]{conn}, $log[0]{conn}, 'kept alive');
    is($log[1]{nth}, 2, 'second on its connection');
    isnt($log[2]{conn}, $log[0]{conn}, 'another connection');
    is_deeply([ map { $_->{index} - $log[0]{index} } @log ], [ 0, 1, 2 ], 'numbered');

    my $counts = $r->counts;
    is($counts->{requests}, 3, 'requests counted');
    is($counts->{connections}, 2, 'connections counted');
    is($counts->{statuses}{200}, 3, 'statuses counted');
    cmp_ok($counts->{bytes_in}, '>', 150, 'bytes counted');
    is($counts->{bytes_out}, 3 * length $answer->{data}, 'bytes counted');

    my $http = HTTP::Tiny->new;
    my $control = 'http://127.0.0.1:' . $r->control_port;
    my $json = decode_json($http->get("$control/log?since=$log[1]{index}")->{content});
    is_deeply([ map { $_->{path} } @{ $json->{entries} } ], [ '/second', '/third' ], 'log as JSON, since');
    is($http->get("$control/nonsense")->{status}, 404, 'unknown command');
    is($http->post("$control/rules/add", { content => '[' })->{status}, 400, 'bad JSON');
    is($http->post("$control/rules/add", { content => '{"path":"("}' })->{status}, 400, 'bad regex');
    is($http->post("$control/mode", { content => '{"mode":"x"}' })->{status}, 400, 'bad mode');
    is(scalar(`curl -s http://127.0.0.1:@{[ $r->port ]}/curl -d x -w '%{http_code}'`), '200', 'curl');

    $r->clear_log;
    is($r->count, 0, 'log cleared');
    ask('/after');
    is(($r->log)[0]{index}, $json->{next} + 1, 'numbering goes on');
};

subtest 'which rule answers' => sub {
    fresh();
    $r->rule(name => 'path',   path => qr{^/p/[0-9]+$}, status => 201);
    $r->rule(name => 'header', with => { 'X-Kind' => '^bad$' }, status => 400);
    $r->rule(name => 'absent', path => '^/absent$', with => { 'x-token' => undef }, status => 401);
    $r->rule(name => 'body',   body_like => '"poison"', status => 500);
    $r->rule(name => 'method', method => '^PUT$', status => 405);
    $r->rule(name => 'later',  path => '^/p/', status => 299);
    is(ask('/p/1')->{status}, 201, 'path: the first wins');
    is(ask('/p/x')->{status}, 299, 'path');
    is(ask('/', '', ['x-kind: bad'])->{status}, 400, 'header');
    is(ask('/', '', ['x-kind: good', 'x-kind: bad'])->{status}, 400, 'second value of a header');
    is(ask('/', '', ['x-kind: badly'])->{status}, 200, 'other header value');
    is(ask('/absent')->{status}, 401, 'absent header');
    is(ask('/absent', '', ['x-token: 1'])->{status}, 200, 'present header');
    is(ask('/', '{"a":"poison"}')->{status}, 500, 'body');
    is(ask('/')->{status}, 200, 'none');
    is(($r->log)[-2]{rule}, 'body', 'the log names the rule');
    is_deeply($r->counts->{rules}, { path => 1, later => 1, header => 2, absent => 1, body => 1 }, 'uses are counted');
    is($r->remove_rule('body'), 1, 'removed');
    is(ask('/', '{"a":"poison"}')->{status}, 200, 'and gone');

    my $statuses = sub { my ($n, @args) = @_; return join ' ', map { ask(@args)->{status} } 1 .. $n };
    $r->set_rules({ nth => [ 2, 4 ], status => 500 });
    is($statuses->(5, '/'), '200 500 200 500 200', 'nth');
    $r->set_rules({ times => 2, status => 500 }, { times => 1, status => 501 });
    is($statuses->(4, '/'), '500 500 501 200', 'times: used up');
    $r->set_rules({ skip => 2, times => 1, status => 500 });
    is($statuses->(4, '/'), '200 200 500 200', 'skip');
    $r->set_rules({ every => 3, status => 500 });
    is($statuses->(6, '/'), '200 200 500 200 200 500', 'every');
    $r->set_rules({ per => 'ce-id', times => 1, status => 500 });
    is(join(' ', map { ask('/', '', ["ce-id: $_"])->{status} } qw(a b a b a c)), '500 500 200 200 200 500', 'per header value');
    $r->set_rules({ chance => 0.5, status => [ 500, 501 ] });
    my %seen;
    $seen{ ask('/')->{status} }++ for 1 .. 60;
    is_deeply([ sort keys %seen ], [ 200, 500, 501 ], 'chance, and one of several statuses');
    $r->set_rules;
    $r->rule(status => 500);
    $r->rule(status => 501, first => 1);
    is(ask('/')->{status}, 501, 'first');
    $r->clear_rules;
    $r->default(status => 503, headers => { 'Retry-After' => 7 });
    like(ask('/')->{data}, qr/^HTTP\/1.1 503 .*^Retry-After: 7\r$/ms, 'another default');
    $r->default(status => 200);
};

subtest 'answers' => sub {
    fresh();
    $r->set_rules({ path => 'dup', headers => [ [ 'X-A', 1 ], [ 'X-A', 2 ] ], raw_headers => "x-raw:\tq\xff\r\n" });
    like(ask('/dup')->{data}, qr/\r\nX-A: 1\r\nX-A: 2\r\n.*x-raw:\tq\xff\r\n\r\n\z/s, 'duplicate and raw headers');
    my $bytes = join '', map { chr } 0 .. 255;
    $r->set_rules({ body => $bytes, status => 418, reason => 'I am a teapot' });
    my $answer = ask('/');
    is($answer->{body}, $bytes, 'binary body');
    like($answer->{data}, qr/^HTTP\/1.1 418 I am a teapot\r$/m, 'reason');
    $r->set_rules({ body_size => 3_000_001 });
    is(length ask('/')->{body}, 3_000_001, 'generated body');
    $r->set_rules({ status => 204 });
    is(ask('/', '', ['Connection: close'], to_end => 1)->{data}, "HTTP/1.1 204 No Content\r\nConnection: close\r\n\r\n", 'no body with 204');
    $r->set_rules({ location => 'http://127.0.0.1/x' });
    like(ask('/')->{data}, qr/^HTTP\/1.1 302 .*^Location: http:\/\/127.0.0.1\/x\r$/ms, 'redirect');
    $r->set_rules({ location => '/y', status => 307 });
    is(ask('/')->{status}, 307, 'redirect with status');
    $r->set_rules({ chunked => [ 'ab', 'cde' ] });
    is(ask('/', '', ['Connection: close'], to_end => 1)->{body}, "2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n", 'chunked');
    is(scalar(`curl -s http://127.0.0.1:@{[ $r->port ]}/ -d x`), 'abcde', 'curl understands it');
    for (
        [ size   => 56, "1\r\na\r\nzz\r\nnot a chunk\r\n" ],
        [ short  => 18, "1\r\na\r\n400\r\nshort" ],
        [ no_end => 18, "1\r\na\r\n" ])
    {
        my ($break, $exit, $body) = @$_;
        $r->set_rules({ chunked => ['a'], chunked_break => $break });
        $answer = ask('/', '', [], to_end => 1);
        is($answer->{body}, $body, "broken chunk: $break");
        is($answer->{end}, 'eof', 'then closed');
        system "curl -s http://127.0.0.1:@{[ $r->port ]}/ -d x >/dev/null";
        is($? >> 8, $exit, "what curl says to it");
        is(($r->log)[-1]{outcome}, 'cut', 'outcome');
    }
    $r->set_rules({ raw => "\x00garbage\n" });
    $answer = ask('/', '', [], to_end => 1);
    is("$answer->{data} $answer->{end}", "\x00garbage\n eof", 'raw');
    is(($r->log)[-1]{outcome}, 'raw', 'outcome');
    $r->set_rules({ raw => "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", keepalive => 1 });
    my $socket = connection();
    for (1, 2)
    {
        print {$socket} request('/');
        is(receive($socket)->{body}, 'x', 'raw, kept alive');
    }
};

subtest 'connections that end' => sub {
    fresh();
    $r->set_rules({ status => 200, body => 'done', keepalive => 0 });
    my $answer = ask('/', '', [], to_end => 1);
    like($answer->{data}, qr/^Connection: close\r$/m, 'keepalive off: announced');
    is($answer->{end}, 'eof', 'and closed');
    $r->set_rules({ status => 200, body => 'done', close => 1 });
    $answer = ask('/', '', [], to_end => 1);
    unlike($answer->{data}, qr/^Connection/m, 'answered and closed: not announced');
    is("$answer->{body} $answer->{end}", 'done eof', 'complete');
    is(($r->log)[-1]{outcome}, 'answered', 'outcome');
    $r->set_rules({ status => 200, close_after_ms => 30 });
    my $socket = connection();
    print {$socket} request('/');
    is(receive($socket)->{end}, 'complete', 'answered');
    is(receive($socket)->{end}, 'eof', 'and closed some time after');

    $r->set_rules({ close => 1 });
    $answer = ask('/');
    is("$answer->{data}|$answer->{end}", '|eof', 'closed without an answer');
    is(($r->log)[-1]{outcome}, 'closed', 'outcome');
    is(($r->log)[-1]{status}, undef, 'no status');
    $r->set_rules({ reset => 1 });
    $answer = ask('/', 'body');
    is("$answer->{data}|$answer->{end}", '|reset', 'reset');
    is(($r->log)[-1]{outcome}, 'reset', 'outcome');
    is(($r->log)[-1]{body}, 'body', 'after the request was read');
    $r->set_rules({ status => 200, body => 'x', reset => 1 });
    is(ask('/', '', [], to_end => 1)->{end}, 'reset', 'answered and reset');

    my $n = $r->count;
    $r->set_rules({ at => 'connect', reset => 1, times => 1 }, { at => 'connect', close => 1, times => 1 });
    $socket = connection();
    is(receive($socket)->{end}, 'reset', 'reset before anything is read') if $socket;
    is(receive(connection())->{end}, 'eof', 'closed before anything is read');
    is(ask('/')->{status}, 200, 'used up');
    is($r->count, $n + 1, 'connections are not requests');
    $r->set_rules({ at => 'connect', raw => 'hello', times => 1 });
    is(receive(connection())->{data}, 'hello', 'bytes before the request');

    $r->set_rules({ at => 'headers', path => 'early', status => 413 }, { at => 'headers', reset => 1 });
    $socket = connection();
    print {$socket} "POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc";
    is(receive($socket)->{status}, 413, 'answered before the body has come');
    is(($r->log)[-1]{incomplete}, 1, 'the log says so');
    print {$socket} 'd' x 5000;
    is(receive($socket)->{end}, 'eof', 'and closed');
    $socket = connection();
    print {$socket} "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nabc";
    is(receive($socket)->{end}, 'reset', 'reset before the body has come');

    $r->set_rules({ half_close => 1 });
    $socket = connection();
    print {$socket} request('/');
    is(receive($socket)->{end}, 'eof', 'half closed');
    is($r->counts->{open_connections}, 1, 'but not closed');
    print {$socket} 'x' x 100000;
    ok($socket->connected && !$socket->error, 'what we send is still taken');
    close $socket;
    wait_for('closed by us', sub { !$r->counts->{open_connections} });

    $r->set_rules({ status => 200, body => 'x' x 1000, cut => 10 });
    $answer = ask('/');
    like($answer->{data}, qr/^Content-Length: 1000\r$/m, 'cut: full length announced');
    is("$answer->{body} $answer->{end}", 'xxxxxxxxxx eof', 'only a part sent');
    is(($r->log)[-1]{outcome}, 'cut', 'outcome');
    $r->set_rules({ cut => 3, reset => 1 });
    is(ask('/')->{end}, 'reset', 'cut by a reset');
    $r->set_rules({ cut => 3, hang => 1 });
    is(ask('/', '', [], quiet => 0.2)->{end}, 'quiet', 'cut and left open');
};

subtest 'time' => sub {
    fresh();
    $r->set_rules({ path => 'slow', delay_ms => 80 }, { path => 'long', delay_ms => 60_000 }, { path => 'range', delay_ms => [ 1, 30 ] }, { path => 'drip', trickle_ms => 2, body => 'abc' },
        { path => 'body', trickle_ms => 20, trickle_from => 'body', body => 'abc' });
    my $begin = now();
    is(ask('/slow')->{status}, 200, 'answered');
    cmp_ok(now() - $begin, '>=', 0.08, 'after the delay');
    my $e = ($r->log)[-1];
    cmp_ok($e->{answered} - $e->{arrival}, '>=', 80_000, 'in the log too');
    ask('/range') for 1 .. 20;
    my @took = sort { $a <=> $b } map { $_->{answered} - $_->{arrival} } $r->log({ path => '/range' });
    cmp_ok($took[0], '>=', 1000, 'random delays');
    cmp_ok($took[-1] - $took[0], '>', 5000, 'differ');
    $begin = now();
    is(ask('/drip')->{body}, 'abc', 'byte by byte');
    cmp_ok(now() - $begin, '>=', 0.08, 'takes its time');
    $begin = now();
    is(ask('/body')->{body}, 'abc', 'only the body byte by byte');
    cmp_ok(now() - $begin, '>=', 0.04, 'takes its time');
    my $socket = connection();
    print {$socket} request('/long');
    wait_for('in flight', sub { $r->in_flight == 1 });
    close $socket;
    $r->wait_idle;
    is(($r->log)[-1]{outcome}, 'peer_closed', 'the client left during the delay');
};

subtest 'requests that hang' => sub {
    fresh();
    my $rule = $r->hang(path => '^/hang');
    my @sockets = map { connection() } 1 .. 4;
    for my $i (0 .. 3) { print { $sockets[$i] } request("/hang/$i") }
    $r->wait_hung(4);
    is($r->in_flight, 4, 'in flight');
    is($r->max_in_flight, 4, 'most in flight');
    is_deeply([ map { $_->{outcome} } $r->log ], [ ('hung') x 4 ], 'outcome');
    is_deeply([ sort map { $_->{in_flight} } $r->log ], [ 1 .. 4 ], 'in flight at arrival');
    is(ask('/other')->{status}, 200, 'others are answered');
    my ($first) = $r->log({ path => '/hang/2' });
    is($r->release(index => $first->{index}, status => 503), 1, 'one released');
    is(receive($sockets[2])->{status}, 503, 'with a status');
    close $sockets[0];
    wait_for('one client has left', sub { $r->hung == 2 });
    is(($r->log({ path => '/hang/0' }))[0]{outcome}, 'peer_closed', 'outcome');
    is($r->release, 2, 'the rest released');
    is(receive($sockets[1])->{status}, 200, 'answered');
    is(receive($sockets[3])->{status}, 200, 'answered');
    is(($r->log({ path => '/hang/1' }))[0]{outcome}, 'answered', 'outcome');
    is($r->in_flight, 0, 'nothing in flight');
    $r->remove_rule($rule);
    is(ask('/hang/5')->{status}, 200, 'hangs no more');
};

subtest 'listening' => sub {
    fresh();
    my $old = connection();
    print {$old} request('/');
    receive($old);
    for (1, 2)
    {
        $r->stop_listening;
        ok(!connection(), 'connection refused');
        print {$old} request('/');
        is(receive($old)->{status}, 200, 'an open connection goes on');
        $r->start_listening;
        is(ask('/')->{status}, 200, 'listening again');
    }
    $r->stop_listening(close => 1);
    is(receive($old)->{end}, 'eof', 'open connections closed too');
    $r->start_listening;

    $r->mode('no_read');
    my $n = $r->count;
    my $unread = connection();
    print {$unread} request('/unread');
    is(receive($unread, quiet => 0.2)->{end}, 'quiet', 'accepts and never reads');
    is($r->count, $n, 'nothing in the log');
    $r->mode('accept');
    is(receive($unread)->{status}, 200, 'reads after all');

    $r->mode('no_accept');
    my $connections = $r->connections;
    $unread = connection();
    ok($unread, 'the kernel connects');
    print {$unread} request('/unread');
    is(receive($unread, quiet => 0.2)->{end}, 'quiet', 'nobody accepts');
    is($r->connections, $connections, 'not even counted');
    $r->mode('accept');
    is(receive($unread)->{status}, 200, 'accepts after all');

    $r->mode('blackhole');
    my $begin = now();
    system "curl -s --connect-timeout 0.3 http://127.0.0.1:@{[ $r->port ]}/";
    is($? >> 8, 28, 'a connection attempt times out');
    cmp_ok(now() - $begin, '>=', 0.3, 'in its time');
    $r->mode('refuse');
    ok(!connection(), 'refused from there');
    $r->mode('blackhole');
    $r->mode('accept');
    is(ask('/')->{status}, 200, 'and back');

    my $idle = connection();
    wait_for('connected', sub { $r->counts->{open_connections} >= 1 });
    $r->close_connections(which => 'idle', reset => 1);
    is(receive($idle)->{end}, 'reset', 'idle connections closed on request');
};

subtest 'requests as they come' => sub {
    fresh();
    my $big = 'payload ' x 1_600_000;
    is(ask('/big', $big)->{status}, 200, '12.8 MB');
    my $e = ($r->log)[-1];
    require Digest::SHA;
    is($e->{body_length}, length $big, 'length');
    is($e->{body_sha256}, Digest::SHA::sha256_hex($big), 'sha');
    is($e->{body}, undef, 'not stored');
    is($e->{body_start}, substr($big, 0, 4096), 'but its start');

    my $socket = connection();
    print {$socket} map { request("/pipe/$_", "b$_") } 1 .. 3;
    my $data = '';
    $data .= receive($socket)->{data} while $data !~ /(?:200 OK.*){3}/s;
    is_deeply([ map { "$_->{path} $_->{body} $_->{nth}" } $r->log({ path => qr/pipe/ }) ],
        [ '/pipe/1 b1 1', '/pipe/2 b2 2', '/pipe/3 b3 3' ], 'pipelined');
    $socket = connection();
    for my $byte (split //, request('/bytes', 'xyz')) { syswrite $socket, $byte }
    is(receive($socket)->{status}, 200, 'byte by byte');
    $socket = connection();
    print {$socket} "POST /chunks HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\n\r\n";
    is(receive($socket)->{status}, 200, 'chunked request');
    is(($r->log)[-1]{body}, 'abcde', 'its body');
    $socket = connection();
    print {$socket} "POST /expect HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n";
    is(receive($socket, length => 25)->{data}, "HTTP/1.1 100 Continue\r\n\r\n", '100 Continue');
    print {$socket} 'abc';
    is(receive($socket)->{status}, 200, 'then the answer');

    for (
        [ 'bare LF'           => "POST / HTTP/1.1\nHost: x\n\n\r\n\r\n" ],
        [ 'control character' => request('/', '', "X-A: b\x01c") ],
        [ 'injected LF'       => request('/', '', "X-A: b\nX-B: c") ],
        [ 'folded line'       => request('/', '', "X-A: b\r\n c") ],
        [ 'bad name'          => request('/', '', 'X A: b') ],
        [ 'two lengths'       => request('/', '', 'Content-Length: 5') ],
        [ 'length and chunks' => request('/', '', 'Transfer-Encoding: chunked') ],
        [ 'blank in path'     => request('/a b') ],
        [ 'no host'           => "POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n" ],
        [ 'bad chunk'         => "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n" ])
    {
        my ($what, $bytes) = @$_;
        $socket = connection();
        print {$socket} $bytes;
        my $answer = receive($socket, to_end => 1);
        is("$answer->{status} $answer->{end}", '400 eof', "malformed: $what");
        ok(($r->log)[-1]{malformed}, 'the log says so');
    }
    is($r->counts->{malformed}, 10, 'counted');
};

subtest 'many connections' => sub {
    fresh();
    my $rule = $r->hang;
    my @sockets = map { connection() } 1 .. 300;
    print {$_} request('/many') for @sockets;
    $r->wait_hung(300);
    is($r->max_in_flight, 300, 'most in flight');
    is($r->release, 300, 'released');
    is(scalar(grep { (receive($_)->{status} // 0) == 200 } @sockets), 300, 'all answered');
    $r->clear_rules;
    my $begin = now();
    for (1 .. 10)
    {
        print {$_} request('/many', 'x' x 200, 'ce-subject: o/1') for @sockets;
        receive($_) for @sockets;
    }
    note sprintf '%.0f requests a second, this client included', 3000 / (now() - $begin);
    is($r->count, 3300, 'all in the log');
};

subtest 'what it means' => sub {
    fresh();
    my $rule = $r->hang(with => { 'ce-id' => '^[bc]$' });
    ask('/', '{}', ce(a => 'order/1', '0000000000000000001'));
    my @sockets = map { connection() } 1 .. 4;
    print { $sockets[0] } request('/', '{}', @{ ce(b => 'order/1', '0000000000000000003') });
    $r->wait_hung(1);
    print { $sockets[1] } request('/', '{}', @{ ce(x => 'order/2', '0000000000000000009') });
    receive($sockets[1]);
    is_deeply([ $r->overlaps_per_aggregate ], [], 'another aggregate is no overlap');
    is_deeply([ $r->out_of_order ], [], 'in order');
    is_deeply([ $r->duplicates ], [], 'no duplicates');
    print { $sockets[2] } request('/', '{}', @{ ce(c => 'order/1', '0000000000000000002') });
    $r->wait_hung(2);
    is(join('|', $r->overlaps_per_aggregate) =~ s/#[0-9]+/#/gr, 'order/1: # while #', 'two of one aggregate at once');
    is_deeply([ $r->out_of_order ], ['order/1: 2 after 3'], 'out of order');
    is_deeply([ $r->ids ], [qw(a b x c)], 'ids');
    my @entries = $r->log({ 'ce-id' => 'a' });
    is_deeply($r->event($entries[0]), {}, 'event');
    is($r->aggregate($entries[0]), 'order/1', 'aggregate');
    is($r->event_id($entries[0]), 'a', 'id');

    # A request whose client has gone is not in flight, even if both reach us together.
    close $sockets[0];
    close $sockets[2];
    ask('/', '{}', ce(d => 'order/1', '0000000000000000004'));
    is($r->overlaps_per_aggregate, 1, 'a client that has left does not count');
    ask('/', '{}', ce(a => 'order/1', '0000000000000000001'));
    is_deeply([ $r->duplicates ], ['a (2 times)'], 'duplicates');
    is_deeply($r->first_arrivals->{'order/1'}, [ map { "000000000000000000$_" } 1, 3, 2, 4 ], 'first arrivals');
    is($r->count(sub { $_->{headers}{'ce-id'}[0] eq 'a' }), 2, 'filter by a sub');
    is($r->count({ 'ce-id' => qr/^[ad]$/, 'ce-type' => 't' }), 3, 'filter by header');

    fresh();
    ask('/', '{"id":"1","aggregate_type":"order","aggregate_id":"7","event_type":"t","seq":2}');
    ask('/', '{"id": "2", "aggregate_type": "order", "aggregate_id": "7", "event_type": "t", "seq": 1}');
    ask('/', 'p', [ 'outbox-event-id: 3', 'outbox-aggregate-type: order', 'outbox-aggregate-id: 7', 'outbox-sequence: 12' ]);
    is_deeply([ $r->ids ], [ 1, 2, 3 ], 'ids of the other formats');
    is_deeply([ $r->out_of_order ], ['order/7: 1 after 2'], 'order of the other formats');
};

subtest 'waiting' => sub {
    my $out = `$^X -I@{[ join ' -I', @INC ]} -MTest::More -MOutboxTest::Wait -e '
        add_diagnostics(sub { "more to see" });
        wait_for("soon", sub { ++\$n > 2 });
        wait_for("never", sub { die "uff\\n" }, timeout => 0.1, got => sub { "n is \$n" });
        done_testing()' 2>&1`;
    like($out, qr/^ok 1 - soon \([0-9.]+ s\)$/m, 'true: passes');
    like($out, qr/^not ok 2 - never$/m, 'deadline: fails');
    like($out, qr/^# got: n is 3$/m, 'says what it got');
    like($out, qr/^# the condition died: uff$/m, 'says the exception');
    like($out, qr/^# more to see$/m, 'shows the diagnostics');
    local $ENV{PG_TEST_TIMEOUT_DEFAULT} = 360;
    is(wait_seconds(60), 120, 'timeouts scale');
};

subtest 'nothing is left behind' => sub {
    my $other = OutboxTest::Receiver->start;
    my $pid = $other->pid;
    kill 'TERM', $pid;
    wait_for('ends on SIGTERM', sub { waitpid($pid, 1) == $pid });
    undef $other;

    my $code = '$r = OutboxTest::Receiver->start; $| = 1; print $r->pid, "\n"; ';
    my @perl = ($^X, (map { "-I$_" } @INC), '-MOutboxTest::Receiver', '-e');
    open my $killed, '-|', @perl, $code . 'kill 9, $$' or die $!;
    chomp($pid = <$killed>);
    close $killed;
    wait_for('ends when its test is killed', sub { !kill 0, $pid });
    open my $dead, '-|', @perl, $code . 'close STDERR; die' or die $!;
    chomp($pid = <$dead>);
    close $dead;
    wait_for('ends when its test dies', sub { !kill 0, $pid });

    $pid = $r->pid;
    $r->stop;
    ok(!kill(0, $pid), 'stopped');
};

done_testing();
