# Every setting takes effect by a reload; a bad value is refused with a word on what is allowed, and the old one stays.

use strict;
use warnings;

use IPC::Run ();
use OutboxTest;
use PostgreSQL::Test::Cluster ();
use PostgreSQL::Test::Utils ();
use Test::More;
use Time::HiRes ();

local $ENV{PATH} = "$ENV{PATH}:/usr/sbin";

my $receiver = start_receiver();
my $node = new_node('main', receiver => $receiver, fast => 1, conf => { 'outbox.retention' => -1 });
create_extension($node);

my %preset = (
    'outbox.endpoint' => $receiver->url,
    map { $_ => undef } qw(outbox.format outbox.http_headers outbox.source outbox.workers outbox.batch_size outbox.max_in_flight
        outbox.max_in_flight_bytes outbox.connect_timeout outbox.request_timeout outbox.max_attempts outbox.notify outbox.ca_file));
my $serial = 0;

sub now { return Time::HiRes::clock_gettime(Time::HiRes::CLOCK_MONOTONIC()) }

# Nothing of an earlier subtest is left.
sub fresh
{
    my (%conf) = @_;
    $receiver->mode('accept');
    $receiver->clear_rules;
    $receiver->release;
    $node->safe_psql('postgres', 'TRUNCATE outbox_events');
    reload($node, %preset, %conf);
    wait_for('nothing in flight', sub { $node->safe_psql('postgres', 'SELECT in_flight FROM outbox_status') eq '0' }, quiet => 1);
    $receiver->clear_log;
    return;
}

# The log entry of a new event.
sub send_one
{
    my (%opt) = @_;
    my $at = $opt{receiver} // $receiver;
    delete $opt{receiver};
    my ($id) = publish($node, id => 'one ' . ++$serial, %opt);
    my ($entry);
    wait_for('the event arrives', sub { ($entry) = grep { ($at->event_id($_) // '') eq $id } $at->log; return $entry }, quiet => 1);
    return $entry // {};
}

sub header { my ($entry, $name) = @_; return join ', ', @{ $entry->{headers}{$name} // ['(none)'] } }

# name => value in a new session
sub settings
{
    my $out = $node->safe_psql('postgres', q(SELECT name || '=' || current_setting(name) || chr(1) FROM pg_settings WHERE name LIKE 'outbox.%'));
    return map { s/^\n//r =~ /^([^=]+)=(.*)$/s } split /\x01/, $out;
}

sub wait_failed
{
    my ($id) = @_;
    my $row;
    wait_for('it failed', sub { $row = event_row($node, $id); return defined $row->{last_error} }, quiet => 1);
    return $row;
}

# Everything 1.3 of the contract lists so far, and all of it by a reload.
is($node->safe_psql('postgres', q(SELECT string_agg(name, ' ' ORDER BY name) FROM pg_settings WHERE name LIKE 'outbox.%' AND context = 'sighup')),
    'outbox.batch_size outbox.ca_file outbox.connect_timeout outbox.databases outbox.endpoint outbox.format outbox.http_headers '
      . 'outbox.max_attempts outbox.max_in_flight outbox.max_in_flight_bytes outbox.notify outbox.ordering outbox.poll_interval '
      . 'outbox.request_timeout outbox.retention outbox.retry_base outbox.retry_cap outbox.shutdown_timeout outbox.source outbox.workers',
    'all settings are there and reload');
is($node->safe_psql('postgres', q(SELECT count(*) FROM pg_settings WHERE name LIKE 'outbox.%' AND context <> 'sighup')), 0, 'no other ones');

subtest 'where events go' => sub {
    fresh();
    my $other = start_receiver();
    send_one();
    reload($node, 'outbox.endpoint' => $other->url('/hook/{aggregate_type}/{event_type}?id={aggregate_id}'));
    is(send_one(receiver => $other, type => 'a b')->{path}, "/hook/a%20b/order.created?id=one%20$serial", 'new events go to the new endpoint');
    is($receiver->count, 1, 'and no longer to the old one');

    reload($node, 'outbox.endpoint' => '');
    my @ids = publish($node, n => 20, aggregates => 5);
    wait_sql($node, 'postgres', 'SELECT state, pending FROM outbox_status', 'no endpoint|20', desc => 'no endpoint: events wait, the status says why');
    reload($node, 'outbox.endpoint' => $receiver->url);
    wait_drained($node);
    is_deeply([ sort $receiver->ids({ 'ce-partitionkey' => qr/^[0-9]$/ }) ], [ sort @ids ], 'an endpoint again: all arrive');
    is_deeply([ $receiver->out_of_order ], [], 'in order');
    is($node->safe_psql('postgres', 'SELECT sum(attempts) FROM outbox_events'), 0, 'no attempt counted');
    wait_sql($node, 'postgres', 'SELECT state FROM outbox_status', 'ok');
};

subtest 'a changed endpoint leaves requests in flight alone' => sub {
    fresh();
    my $other = start_receiver();
    $receiver->hang;
    my @ids = publish($node, n => 6, aggregates => 3);
    $receiver->wait_hung(3);
    reload($node, 'outbox.endpoint' => $other->url);
    send_one(receiver => $other);
    $receiver->release;
    wait_drained($node);
    is_deeply([ sort $receiver->ids, $other->ids({ 'ce-partitionkey' => qr/^[0-9]$/ }) ], [ sort @ids ], 'each event went to one of them');
    is(scalar $receiver->ids, 3, 'those in flight to the old one');
};

subtest 'what a request looks like' => sub {
    fresh();
    my $e = send_one(payload => { a => 1 });
    is(header($e, 'ce-specversion'), '1.0', 'cloudevents');
    is($e->{body}, '{"a": 1}', 'its body');
    like(header($e, 'ce-source'), qr/^urn:outbox:[0-9]+:postgres$/, 'the source preset');
    reload($node, 'outbox.source' => '/orders');
    is(header(send_one(), 'ce-source'), '/orders', 'source');
    reload($node, 'outbox.format' => 'json');
    $e = send_one(payload => { a => 1 });
    is_deeply([ sort keys %{ $receiver->event($e) } ],
        [qw(aggregate_id aggregate_type created_at event_type headers id payload seq)], 'format json');
    is(header($e, 'ce-id'), '(none)', 'no headers of the format before');
    reload($node, 'outbox.format' => 'payload');
    $e = send_one(payload => { a => 1 });
    is($e->{body}, '{"a": 1}', 'format payload');
    is(header($e, 'outbox-event-type'), 'order.created', 'its headers');
    reload($node, 'outbox.http_headers' => '{"Authorization": "Bearer one", "X-Tenant": "a"}');
    $e = send_one();
    is(header($e, 'authorization') . ' ' . header($e, 'x-tenant'), 'Bearer one a', 'http_headers');
    reload($node, 'outbox.http_headers' => '{"Authorization": "Bearer two"}');
    $e = send_one();
    is(header($e, 'authorization') . ' ' . header($e, 'x-tenant'), 'Bearer two (none)', 'changed');
    reload($node, 'outbox.http_headers' => '');
    is(header(send_one(), 'authorization'), '(none)', 'and gone');
};

subtest 'how much at once' => sub {
    fresh('outbox.max_in_flight' => 4);
    $receiver->rule(delay_ms => 20);
    my @ids = map { publish($node, type => $_, n => 40, aggregates => 40) } qw(a b);
    wait_drained($node);
    cmp_ok($receiver->max_in_flight, '<=', 4, 'never more than max_in_flight');
    cmp_ok($receiver->max_in_flight, '>=', 2, 'but several');

    fresh('outbox.max_in_flight' => 32);
    $receiver->hang;
    publish($node, type => $_, n => 100, aggregates => 100) for qw(a b);
    $receiver->wait_hung(20);
    reload($node, 'outbox.max_in_flight' => 2);
    $receiver->clear_rules;
    $receiver->release;
    wait_drained($node);
    cmp_ok($receiver->max_in_flight, '<=', 32, 'a raised limit holds');
    $receiver->clear_log;
    publish($node, type => $_, n => 20, aggregates => 20) for qw(a b);
    wait_drained($node);
    cmp_ok($receiver->max_in_flight, '<=', 2, 'so does a lowered one');

    fresh('outbox.max_in_flight' => 1);
    @ids = publish($node, n => 20, aggregates => 5);
    wait_drained($node);
    is($receiver->max_in_flight, 1, 'one at a time');
    is_deeply([ sort $receiver->ids ], [ sort @ids ], 'all arrive');

    fresh('outbox.batch_size' => 1);
    @ids = publish($node, n => 100, aggregates => 10);
    wait_drained($node);
    is_deeply([ sort $receiver->ids ], [ sort @ids ], 'batch_size 1: all arrive');
    is_deeply([ $receiver->out_of_order ], [], 'in order');

    fresh('outbox.max_in_flight_bytes' => '1MB');
    $receiver->rule(delay_ms => 30);
    @ids = publish($node, n => 12, aggregates => 12, payload => '{"x": "' . 'x' x 300_000 . '"}');
    wait_drained($node);
    cmp_ok($receiver->max_in_flight, '<=', 3, 'max_in_flight_bytes: no more of 300 kB at once than fit');
    is_deeply([ sort $receiver->ids ], [ sort @ids ], 'all arrive');
    $receiver->clear_log;
    my ($large) = publish($node, payload => '{"x": "' . 'x' x 2_000_000 . '"}');
    $receiver->wait_requests(1, { 'ce-id' => $large }, desc => 'a larger event goes, too');
};

subtest 'timeouts' => sub {
    fresh('outbox.request_timeout' => '200ms', 'outbox.retry_base' => '1h', 'outbox.retry_cap' => '1h');
    $receiver->hang;
    my ($id) = publish($node);
    my $row = wait_failed($id);
    is($row->{attempts}, 1, 'request_timeout: an attempt');
    like($row->{last_error}, qr/timed? ?out/i, 'its error says so');
    is($node->safe_psql('postgres', "SELECT retry_after BETWEEN now() + '45 min' AND now() + '75 min' FROM outbox_events"), 't', 'retry_base is its pause');
    reload($node, 'outbox.request_timeout' => undef, 'outbox.retry_base' => '50ms', 'outbox.retry_cap' => '500ms');
    $receiver->clear_rules;
    $receiver->rule(status => 500, times => 2);
    $node->safe_psql('postgres', 'UPDATE outbox_events SET retry_after = NULL');
    wait_drained($node);
    is(event_row($node, $id)->{attempts}, 3, 'a shorter retry_base is in force for the next failures');

    fresh('outbox.connect_timeout' => '200ms');
    $receiver->mode('blackhole');
    $receiver->close_connections;
    ($id) = publish($node);
    $row = wait_failed($id);
    is($row->{attempts}, 0, 'connect_timeout: no attempt, nothing was sent');
    like($row->{last_error}, qr/timed? ?out|after [0-9]+ ms/i, 'its error says so');
    $receiver->mode('accept');
    wait_drained($node);

    fresh('outbox.max_attempts' => 1);
    $receiver->rule(status => 500);
    ($id) = publish($node);
    wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_dead_letters', 1, desc => 'max_attempts 1: dead at once');

    fresh('outbox.poll_interval' => '1h');
    reload($node, 'outbox.poll_interval' => '200ms');
    $node->safe_psql('postgres', 'ALTER TABLE outbox_events DISABLE TRIGGER outbox_insert_notify');
    for my $n (1 .. 2)
    {
        ($id) = publish($node);
        $receiver->wait_requests(1, { 'ce-id' => $id }, desc => 'poll_interval: what nobody announced arrives', timeout => 10);
    }
    $node->safe_psql('postgres', 'ALTER TABLE outbox_events ENABLE ALWAYS TRIGGER outbox_insert_notify');
};

subtest 'notify' => sub {
    fresh();
    my $insert = q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', i::text, 'order.created', '{}' FROM generate_series(1, 3) i);
    my $listen = sub { return $node->safe_psql('postgres', "LISTEN outbox_event; SELECT 1; $insert RETURNING id; SELECT 1") };
    unlike($listen->(), qr/notification/, 'off: none');
    reload($node, 'outbox.notify' => 'on');
    my $out      = $listen->();
    my @ids      = $out =~ /^([0-9a-f-]{36})$/mg;
    my @payloads = $out =~ /^Asynchronous notification "outbox_event" with payload "([^"]*)"/mg;
    is(scalar @ids, 3, 'on: three rows');
    is_deeply(\@payloads, \@ids, 'one notification a row, its payload the id');
    $out = $node->safe_psql('postgres', "LISTEN outbox_event; BEGIN; $insert; ROLLBACK; SELECT 1");
    unlike($out, qr/notification/, 'none for what was rolled back');
    reload($node, 'outbox.notify' => 'off');
    unlike($listen->(), qr/notification/, 'off again');
    wait_drained($node);
};

subtest 'workers' => sub {
    fresh();
    wait_workers($node, 1);
    my @first = worker_pids($node);
    reload($node, 'outbox.workers' => 4);
    wait_workers($node, 4);
    is(scalar(grep { $_ == $first[0] } worker_pids($node)), 1, 'the first is still there');
    $receiver->rule(delay_ms => [ 1, 10 ]);
    my @ids = publish($node, n => 400, aggregates => 100);
    reload($node, 'outbox.workers' => 2);
    wait_workers($node, 2);
    wait_drained($node);
    is_deeply([ sort $receiver->ids ], [ sort @ids ], 'all arrive');
    is_deeply([ $receiver->duplicates ], [], 'nothing twice');
    is_deeply([ $receiver->out_of_order ], [], 'in order');
    reload($node, 'outbox.workers' => 1);
    wait_workers($node, 1);
};

# --- bad values ------------------------------------------------------------------------------------------------------

my $secret = 'hunter2';
my %bad = (
    'outbox.endpoint' => [
        [ 'ftp://example.com/',                    qr/must begin with http:\/\/ or https:\/\// ],
        [ 'example.com/hook',                      qr/must begin with http:\/\/ or https:\/\// ],
        [ 'http://{aggregate_type}.example.com/',  qr/in path and query/ ],
        [ 'http://example.com/{payload}',          qr/\{aggregate_type\}, \{aggregate_id\} and \{event_type\}/ ],
        [ "http://example.com/a\r\nX-Injected: 1", qr/printable ASCII/ ],
        [ "http://example.com/a\tb",               qr/printable ASCII/ ],
        [ 'http://example.com/#fragment',          qr/without space, backslash and fragment/ ],
        [ 'http://',                               qr/must name a host/ ],
        [ 'http://example.com:99999/',             qr/port/ ],
        [ "https://user:$secret\@example.com/#x",  qr/without space, backslash and fragment/ ],
    ],
    'outbox.http_headers' => [
        [ 'X-A: 1',                                            qr/JSON object of strings/ ],
        [ '["X-A", "1"]',                                      qr/JSON object of strings/ ],
        [ '{"X-A": 1}',                                        qr/JSON object of strings/ ],
        [ '{"X-A": {"b": "c"}}',                               qr/JSON object of strings/ ],
        [ '{"X A": "1"}',                                      qr/not a token/ ],
        [ '{"": "1"}',                                         qr/not a token/ ],
        [ '{"X-A": "1\r\nX-Injected: 2"}',                     qr/control character/ ],
        [ '{"Host": "example.com"}',                           qr/reserved/ ],
        [ '{"ce-id": "1"}',                                    qr/reserved/ ],
        [ qq({"Authorization": "Bearer $secret", "X A": "1"}), qr/not a token/ ],
    ],
    'outbox.databases'           => [ [ 'a b', qr/comma-separated list/ ], [ '"open', qr/comma-separated list/ ], [ 'a,,b', qr/comma-separated list/ ], [ ',', qr/comma-separated list/ ] ],
    'outbox.workers'             => [ [ 0, qr/\(1 \.\. 64\)/ ], [ 65, qr/\(1 \.\. 64\)/ ], [ -1, qr/\(1 \.\. 64\)/ ], [ 'many', qr/invalid value/ ] ],
    'outbox.batch_size'          => [ [ 0, qr/\(1 \.\. 10000\)/ ], [ 10001, qr/\(1 \.\. 10000\)/ ] ],
    'outbox.max_in_flight'       => [ [ 0, qr/\(1 \.\. / ] ],
    'outbox.max_in_flight_bytes' => [ [ 0, qr/ \.\. / ] ],
    'outbox.poll_interval'       => [ [ '50ms', qr/\(100 (?:ms )?\.\. / ], [ '5 parsecs', qr/Valid units/ ] ],
    'outbox.connect_timeout'     => [ [ 0, qr/ \.\. / ] ],
    'outbox.request_timeout'     => [ [ -5, qr/ \.\. / ] ],
    'outbox.max_attempts'        => [ [ 0, qr/\(1 \.\. / ] ],
    'outbox.retry_base'          => [ [ 0, qr/ \.\. / ] ],
    'outbox.retention'           => [ [ -2, qr/\(-1 s? ?\.\. / ] ],
    'outbox.format'              => [ [ 'xml', qr/cloudevents, json, payload/ ] ],
    'outbox.ordering'            => [ [ 'random', qr/aggregate, none/ ] ],
    'outbox.notify'              => [ [ 'perhaps', qr/Boolean/ ] ],
    'outbox.source'              => [ [ 'two words', qr/URI/ ], [ "a\nb", qr/URI/ ] ],
    'outbox.ca_file'             => [ [ 'relative.pem', qr/absolute path/ ], [ "/a\nb", qr/absolute path/ ] ],
);

# What the server says about a setting: the message, its detail and hint.
sub said_about
{
    my ($name, $log) = @_;
    my $text = '';
    for my $message (split /^(?=.*?(?:LOG|ERROR|WARNING|FATAL):  )/m, $log)
    {
        $text .= $message if $message =~ /(?:LOG|ERROR):  .*"\Q$name\E"/;
    }
    return $text;
}

sub printable { my ($value) = @_; return $value =~ s/([^ -~])/sprintf '\\x%02x', ord $1/ger }

subtest 'bad values in postgresql.conf are refused, and the old ones stay in force' => sub {
    fresh('outbox.http_headers' => '{"X-Old": "still here"}', 'outbox.source' => '/old');
    my %old = settings();
    my $all = '';
    for my $round (0 .. 9)
    {
        my @names  = grep { $bad{$_}[$round] } sort keys %bad;
        my $offset = log_offset($node);
        reload($node, map { $_ => $bad{$_}[$round][0] } @names);
        my $log = log_since($node, $offset);
        my %now = settings();
        for my $name (@names)
        {
            my ($value, $allowed) = @{ $bad{$name}[$round] };
            like(said_about($name, $log), $allowed, "$name = " . printable($value) . ': the log says what is allowed');
            is($now{$name}, $old{$name}, 'and the old value is in force');
        }
        $all .= $log;
        set_conf($node, map { $_ => $old{$_} } @names);
    }
    is_deeply([ grep { /\Q$secret\E/ } split /\n/, $all ], [], 'no secret of a refused value is in the log');
    my $e = send_one();
    is(header($e, 'x-old') . ' ' . header($e, 'ce-source'), 'still here /old', 'the relay works as before');
    reload($node);
};

subtest 'ALTER SYSTEM refuses bad values' => sub {
    my @names = sort keys %bad;
    my $sql   = join '', map { "ALTER SYSTEM SET $_ = '" . ($bad{$_}[0][0] =~ s/'/''/gr) . "';\n" } @names;
    my ($ret, $out, $err) = $node->psql('postgres', $sql, on_error_stop => 0);
    my %said;    # by line of the statement
    $err .= "\n";
    push @{ $said{$1} }, $2 while $err =~ /^psql:<stdin>:([0-9]+): (ERROR:.*\n(?:(?!psql:).*\n?)*)/mg;
    for my $line (1 .. @names)
    {
        my $name = $names[ $line - 1 ];
        my $text = join '', @{ $said{$line} // [] };
        like($text, $bad{$name}[0][1], "$name: refused with what is allowed");
        like($text, qr/^DETAIL:  .+\nHINT:  .+/m, 'in a detail and a hint')
          if $name =~ /\.(?:endpoint|http_headers|databases|source|ca_file)$/;
    }
    isnt($node->psql('postgres', q(ALTER SYSTEM SET outbox.nonsense = '1')), 0, 'a setting that does not exist is refused');
    $node->safe_psql('postgres', q(ALTER SYSTEM SET outbox.endpoint = 'http://localhost/{event_type}'));
    $node->safe_psql('postgres', 'ALTER SYSTEM RESET ALL');
};

subtest 'nobody but the configuration says where events go' => sub {
    for my $statement (
        q(SET outbox.endpoint = 'http://example.com/'),
        q(SET LOCAL outbox.http_headers = '{}'),
        q(SELECT set_config('outbox.endpoint', 'http://example.com/', false)),
        q(ALTER DATABASE postgres SET outbox.endpoint = 'http://example.com/'),
        q(ALTER ROLE CURRENT_USER SET outbox.databases = ''),
        q(CREATE FUNCTION f() RETURNS int LANGUAGE sql SET outbox.endpoint = 'http://example.com/' AS 'SELECT 1'))
    {
        my ($ret, $out, $err) = $node->psql('postgres', $statement);
        like($err, qr/cannot be changed now/, $statement);
    }
};

subtest 'a plain role cannot see endpoint and http_headers' => sub {
    fresh("outbox.http_headers" => qq({"Authorization": "Bearer $secret"}));
    $node->safe_psql('postgres', 'CREATE ROLE plain');
    for my $name ('outbox.endpoint', 'outbox.http_headers')
    {
        for my $query ("SHOW $name", "SELECT current_setting('$name')", "SELECT current_setting('$name', true)")
        {
            my ($ret, $out, $err) = $node->psql('postgres', "SET ROLE plain; $query");
            isnt($ret, 0, $query);
            like($err, qr/must be superuser or have privileges of pg_read_all_settings/, 'refused');
            unlike("$out$err", qr/\Q$secret\E|127\.0\.0\.1/, 'the value is not told');
        }
    }
    is($node->safe_psql('postgres', q(SET ROLE plain; SELECT count(*) FROM pg_settings WHERE name IN ('outbox.endpoint', 'outbox.http_headers'))), 0, 'pg_settings');
    is($node->safe_psql('postgres', 'SET ROLE plain; SHOW ALL') =~ /\Q$secret\E/, '', 'SHOW ALL');
    is($node->safe_psql('postgres', q(SET ROLE plain; SHOW outbox.format)), 'cloudevents', 'others can be seen');
    $node->safe_psql('postgres', 'DROP ROLE plain');
};

# --- TLS ---------------------------------------------------------------------------------------------------------------

# nginx with certificates of a CA of our own: for 127.0.0.1, and for another host on a second port. Hands on to the receiver.
sub start_tls
{
    my $dir = PostgreSQL::Test::Utils::tempdir();
    my ($good, $wrong) = map { PostgreSQL::Test::Cluster::get_free_port() } 1 .. 2;
    my $openssl = sub { PostgreSQL::Test::Utils::system_or_bail('openssl', @_) };
    my @new_key = ('-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes');
    $openssl->('req', '-x509', @new_key, '-keyout', "$dir/ca.key", '-out', "$dir/ca.pem", '-days', 30, '-subj', '/CN=test CA',
        '-addext', 'basicConstraints=critical,CA:true', '-addext', 'keyUsage=critical,keyCertSign');
    for ([ good => 'IP:127.0.0.1' ], [ wrong => 'DNS:other.example' ])
    {
        my ($name, $alt) = @$_;
        PostgreSQL::Test::Utils::append_to_file("$dir/$name.ext", "subjectAltName=$alt\n");
        $openssl->('req', @new_key, '-keyout', "$dir/$name.key", '-out', "$dir/$name.csr", '-subj', "/CN=$name");
        $openssl->('x509', '-req', '-in', "$dir/$name.csr", '-CA', "$dir/ca.pem", '-CAkey', "$dir/ca.key", '-CAcreateserial',
            '-days', 30, '-extfile', "$dir/$name.ext", '-out', "$dir/$name.pem");
    }
    my $server = sub {
        my ($port, $name) = @_;
        return "server { listen 127.0.0.1:$port ssl; ssl_certificate $dir/$name.pem; ssl_certificate_key $dir/$name.key;"
          . ' location / { proxy_pass ' . $receiver->url . '; proxy_http_version 1.1; proxy_read_timeout 1h; } }';
    };
    PostgreSQL::Test::Utils::append_to_file("$dir/nginx.conf", join "\n",
        'daemon off; master_process off; worker_processes 1;', "pid $dir/nginx.pid; error_log $dir/error.log;", 'events { worker_connections 256; }',
        'http { access_log off;', (map { "${_}_temp_path $dir/$_;" } qw(client_body proxy fastcgi uwsgi scgi)),
        $server->($good, 'good'), $server->($wrong, 'wrong'), '}', '');
    my $process = IPC::Run::start([ 'nginx', '-c', "$dir/nginx.conf", '-p', $dir, '-e', "$dir/error.log" ], '<', \undef, '>&', \my $out);
    wait_for('nginx listens', sub { IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $good) });
    return { process => $process, ca => "$dir/ca.pem", good => "https://127.0.0.1:$good/", wrong => "https://127.0.0.1:$wrong/" };
}

subtest 'certificates' => sub {
    require IO::Socket::INET;
    my $tls = start_tls();
    fresh('outbox.endpoint' => $tls->{good});
    my ($id) = publish($node);
    my $row = wait_failed($id);
    like($row->{last_error}, qr/certificate/, 'a CA that nobody trusts: the error says so');
    is($row->{attempts}, 0, 'no attempt counted');
    is($row->{processed_at}, undef, 'the event waits');
    is($receiver->count, 0, 'nothing was sent');

    reload($node, 'outbox.ca_file' => $tls->{ca});
    $receiver->wait_requests(1, { 'ce-id' => $id }, desc => 'with ca_file it is delivered');
    wait_drained($node);

    reload($node, 'outbox.endpoint' => $tls->{wrong});
    ($id) = publish($node);
    $row = wait_failed($id);
    like($row->{last_error}, qr/certificate|subject name|host name/, 'a certificate of another host is refused');
    is($row->{attempts}, 0, 'no attempt counted');
    reload($node, 'outbox.endpoint' => $tls->{good});
    wait_drained($node);

    reload($node, 'outbox.ca_file' => '/nowhere/ca.pem');
    ($id) = publish($node);
    $row = wait_failed($id);
    like($row->{last_error}, qr/certificate/, 'a ca_file that is not there: the error says so');
    is($row->{attempts}, 0, 'no attempt counted');
    reload($node, 'outbox.ca_file' => $tls->{ca});
    wait_drained($node);

    # A handle that was busy at the reload must not remember the file.
    $receiver->hang;
    publish($node, n => 3, aggregates => 3);
    $receiver->wait_hung(3);
    reload($node, 'outbox.ca_file' => '');
    $receiver->clear_rules;
    is($receiver->release, 3, 'requests in flight at the reload are answered');
    wait_drained($node);
    my @ids = publish($node, n => 5, aggregates => 5);
    wait_for('after it, none is sent or all have failed', sub {
        return !grep { !defined $_->{last_error} && $_->{state} ne 'delivered' } map { event_row($node, $_) } @ids;
    });
    is_deeply([ grep { event_row($node, $_)->{state} eq 'delivered' } @ids ], [], 'nothing goes to a host that is no longer trusted');
    reload($node, 'outbox.ca_file' => $tls->{ca});
    wait_drained($node);
    $tls->{process}->kill_kill;
};

unlike(log_since($node, 0), qr/PANIC|TRAP|terminated by signal/, 'no process died');

done_testing();
