# What is on the wire: the payload byte for byte, the headers of each format, and nothing that a writer could smuggle
# in.

use strict;
use warnings;

use JSON::PP;
use Test::More;

use OutboxTest;

my $receiver = start_receiver(store_body => 8 << 20);
my $node     = new_node('main', receiver => $receiver, conf => { 'outbox.max_attempts' => 3 });
create_extension($node);
wait_workers($node, 1);

my $json = JSON::PP->new->utf8->canonical->allow_nonref->allow_bignum;

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

sub quote { my ($text) = @_; return "'" . ($text =~ s/'/''/gr) . "'" }

sub header { my ($entry, $name) = @_; return join '|', @{ $entry->{headers}{$name} // ['(none)'] } }

# Percent-encoding of header values, CloudEvents HTTP binding 3.1.3.2.
sub encoded { my ($bytes) = @_; return $bytes =~ s/([^\x21-\x7e]|["%])/sprintf '%%%02X', ord $1/ger }

# Settings, and until the worker has them.
my $settled = 0;

sub settle
{
    reload($node, @_);
    my $name = 'settled' . ++$settled;
    sql("SELECT outbox_publish('settled', '$name', 'e', '{}')");
    wait_sql($node, 'postgres', "SELECT count(*) FROM outbox_events WHERE aggregate_id = '$name' AND processed_at IS NULL", 0,
        desc => 'the worker has the settings');
    $receiver->clear_log;
    return;
}

my $source = 'urn:outbox:' . sql('SELECT system_identifier FROM pg_control_system()') . ':postgres';

# ---------------------------------------------------------------------------------------------------------
# The payload

my %payload = (
    'scalar number'           => '1',
    'null'                    => 'null',
    'true'                    => 'true',
    'empty string'            => '""',
    'string'                  => '"plain"',
    'empty array'             => '[]',
    'empty object'            => '{}',
    'empty key'               => '{"": {"": []}}',
    'nested'                  => '{"a": [1, [2, {"b": [null, true, {"c": "d"}]}]]}',
    'deep'                    => '[' x 200 . ']' x 200,
    'beyond double'           => '{"n": 123456789012345678901234567890.123456789012345678901234567890}',
    'large exponent'          => '[1e300, 1E-30, 1.5e+10]',
    'trailing zeros'          => '[1.10, 0.000, 100]',
    'negative'                => '[-1, -0.5, -9223372036854775809]',
    'unicode'                 => "{\"\xc3\xa4\xe2\x82\xac\": \"\xe6\x97\xa5\xe6\x9c\xac \xf0\x9f\x98\x80 e\xcc\x81 \xd7\xa9\"}",
    'escaped unicode'         => '{"x": "\\u00e4\\u20ac\\ud83d\\ude00"}',
    'control characters'      => '{"x": "\\u0001\\b\\f\\n\\r\\t\\u001f\\u007f"}',
    'quotes and backslashes'  => '{"q\\"": "\\\\ \\" \\/ \' \\\\n"}',
    'html'                    => '{"x": "<script>&amp;</script>", "u": "\\u2028\\u2029"}',
    'spaces'                  => " { \"a\" :\n [ 1 ,\t2 ] } ",
    'keys twice'              => '{"a": 1, "a": 2, "b": 3}',
    'a line like a header'    => '{"x": "\\r\\n\\r\\nPOST / HTTP/1.1\\r\\nHost: evil"}',
    'chunk like'              => '"0\\r\\n\\r\\n"',
);

sub compare_payloads
{
    my ($format) = @_;
    my @names = sort keys %payload;
    sql(join ' ', map { sprintf 'SELECT outbox_publish(\'payload\', %s, \'e\', %s);', quote($_), quote($payload{$_}) } @names);
    sql(q(SELECT outbox_publish('payload', 'large', 'e', jsonb_build_object('x', repeat('0123456789abcde"', 65536)))));
    sql(q(SELECT outbox_publish('payload', 'many small', 'e', (SELECT jsonb_agg(i) FROM generate_series(1, 20000) i))));
    $receiver->wait_requests(@names + 2, answered => 1, desc => "all arrive as $format");
    wait_drained($node);
    my %text = map { split /\t/, $_, 2 }
      split /\n/, sql(q(SELECT aggregate_id || chr(9) || payload::text FROM outbox_events WHERE aggregate_type = 'payload'));
    my %got = map { $receiver->aggregate($_) =~ s{^payload/}{}r =~ s/%20/ /gr, $_ } $receiver->log;
    my @wrong;
    for my $name (sort keys %text)
    {
        my $body = $got{$name}{body};
        my $want = $format eq 'json' ? undef : $text{$name};
        $want //= $body if index($body // '', ",\"payload\":$text{$name},\"headers\":") > 0;
        push @wrong, $name if !defined $body || !defined $want || $body ne $want;
    }
    is_deeply(\@wrong, [], "the body is payload::text, not something like it ($format)");
    is(scalar keys %text, @names + 2, '... of all payloads');
    sql(q(DELETE FROM outbox_events WHERE aggregate_type = 'payload'));
    return;
}

# ---------------------------------------------------------------------------------------------------------
# The headers

# Name => [aggregate_type, aggregate_id, event_type].
my %named = (
    plain    => [ 'order',           '42',              'order.created' ],
    awkward  => [ "or der\xc3\xa4",  "a/b%20\"\xe2\x82\xac", "x\ty\r\nEvil: 1" ],
    long     => [ 'T' x 100,         "\xc3\xa4" x 100,   '%' x 100 ],
    dots     => [ '..',              '../../x',         'a;b,c=d?e#f' ],
);

sub publish_named
{
    my ($format) = @_;
    $receiver->clear_log;
    my %id;
    for my $name (sort keys %named)
    {
        $id{$name} = sql('SELECT outbox_publish(' . join(', ', map { quote($_) } @{ $named{$name} })
              . q[, '{"n": 1}', '{"traceparent": "00-abc-def-01", "Tenant": "t 1", "x-empty": ""}')]);
    }
    $receiver->wait_requests(scalar keys %named, desc => "events of all names arrive as $format");
    wait_drained($node);
    my %entry = map { $receiver->event_id($_), $_ } $receiver->log;
    return map {
        my ($seq, $time) = split /\|/,
          sql(q(SELECT seq, to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"') FROM outbox_events)
              . " WHERE id = '$id{$_}'");
        $_ => { id => $id{$_}, entry => $entry{ $id{$_} } // {}, seq => $seq, time => $time,
            type => $named{$_}[0], aggregate => $named{$_}[1], event => $named{$_}[2] }
    } sort keys %named;
}

sub common_headers
{
    my ($e) = @_;
    my $entry = $e->{entry};
    is($entry->{method},  'POST',     'POST');
    is($entry->{version}, '1.1',      'HTTP/1.1');
    is(header($entry, 'host'),            $receiver->host,    'Host');
    is(header($entry, 'content-type'),    'application/json', 'Content-Type, once');
    is(header($entry, 'idempotency-key'), $e->{id},           'Idempotency-Key is the event id');
    is(header($entry, 'content-length'),  length $entry->{body}, 'Content-Length');
    is(header($entry, 'traceparent'),     '00-abc-def-01',    'a header of the event');
    is(header($entry, 'tenant'),          't 1',              'another');
    is(header($entry, 'x-empty'),         '',                 'an empty one');
    is(header($entry, 'authorization'),   'Bearer t0k"en',    'outbox.http_headers');
    is(header($entry, 'x-env'),           'test, a: b',       '... all of them');
    is(header($entry, $_), '(none)', "no $_") for qw(expect evil transfer-encoding outbox-replay cookie);
    return;
}

sub check_exactly
{
    my ($e, %want) = @_;
    my $prefix = join '|', map { s/-.*//r } keys %want;
    my %have = map { $_ => header($e->{entry}, $_) } grep { /^(?:$prefix)-/ } keys %{ $e->{entry}{headers} };
    is_deeply(\%have, \%want, 'exactly the headers of the format');
    return;
}

my %check = (
    cloudevents => sub {
        my ($e) = @_;
        check_exactly(
            $e,
            'ce-specversion'  => '1.0',
            'ce-id'           => $e->{id},
            'ce-source'       => $source,
            'ce-type'         => encoded($e->{event}),
            'ce-subject'      => encoded("$e->{type}/$e->{aggregate}"),
            'ce-time'         => $e->{time},
            'ce-partitionkey' => encoded($e->{aggregate}),
            'ce-sequence'     => sprintf('%019d', $e->{seq}));
        is($e->{entry}{body}, '{"n": 1}', 'body');
    },
    payload => sub {
        my ($e) = @_;
        check_exactly(
            $e,
            'outbox-event-id'       => $e->{id},
            'outbox-event-type'     => encoded($e->{event}),
            'outbox-aggregate-type' => encoded($e->{type}),
            'outbox-aggregate-id'   => encoded($e->{aggregate}),
            'outbox-sequence'       => sprintf('%019d', $e->{seq}));
        is($e->{entry}{body}, '{"n": 1}', 'body');
    },
    json => sub {
        my ($e) = @_;
        unlike($e->{entry}{body}, qr/[\x00-\x1f\x7f]/, 'no raw control character in the body');
        my $body = eval { $json->decode($e->{entry}{body}) } // {};
        is_deeply(
            $body,
            {
                id => $e->{id}, seq => 0 + $e->{seq}, created_at => $e->{time}, payload => { n => 1 },
                headers => { traceparent => '00-abc-def-01', Tenant => 't 1', 'x-empty' => '' },
                aggregate_type => text($e->{type}), aggregate_id => text($e->{aggregate}), event_type => text($e->{event}),
            },
            'the body holds it all, and nothing else');
    },
);

sub text { my ($bytes) = @_; utf8::decode($bytes); return $bytes }

for my $format (qw(cloudevents json payload))
{
    settle('outbox.format' => $format);
    compare_payloads($format);
    settle('outbox.http_headers' => '{"Authorization": "Bearer t0k\\"en", "X-Env": "test, a: b"}');
    my %event = publish_named($format);
    for my $name (sort keys %event)
    {
        subtest "nothing is lost or confused on the wire: $format, $name names" => sub {
            common_headers($event{$name});
            $check{$format}->($event{$name});
        };
    }
    settle('outbox.http_headers' => undef);
}

subtest 'a receiver can tell a replay' => sub {
    settle('outbox.format' => 'cloudevents', 'outbox.source' => '/orders?x=1');
    my ($id) = publish($node, headers => { tenant => 't' });
    $receiver->wait_requests(1);
    wait_drained($node);
    sql("SELECT outbox_replay('$id')");
    $receiver->wait_requests(2);
    my ($first, $second) = $receiver->log;
    is(header($first,  'outbox-replay'), '(none)', 'the first send is not marked');
    is(header($second, 'outbox-replay'), 'true',   'the replay is');
    is(header($second, 'ce-id'), $id, '... with the same id');
    is(header($second, 'tenant'), 't', '... and the event\'s headers');
    is(header($second, 'ce-source'), '/orders?x=1', 'outbox.source is the source');
    wait_drained($node);
};

subtest 'an odd time of creation holds up nothing' => sub {
    settle();
    my %time = (
        'infinity' => undef, '-infinity' => undef, '0044-03-15 12:00:00+00 BC' => undef, '294276-12-31 23:59:59.999999+00' => undef,
        '0001-01-01 00:00:00+00' => '0001-01-01T00:00:00.000000Z', '1969-12-31 23:59:59.999999+00' => '1969-12-31T23:59:59.999999Z',
        '9999-12-31 23:59:59.999999+00' => '9999-12-31T23:59:59.999999Z', '2024-02-29 12:00:00+05:30' => '2024-02-29T06:30:00.000000Z');
    my @times = sort keys %time;
    sql(join ' ', map { 'INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at) '
        . "VALUES ('time', '$_', 'e', '{}', '$times[$_]');" } 0 .. $#times);
    $receiver->wait_requests(scalar @times);
    wait_drained($node);
    is_deeply({ map { $times[ header($_, 'ce-partitionkey') ], $_->{headers}{'ce-time'}[0] } $receiver->log }, \%time,
        'ce-time is RFC 3339 in UTC, or absent where that cannot say it');
    like(sql('SELECT state FROM outbox_status'), qr/^ok$/, 'the status can be read');
};

# ---------------------------------------------------------------------------------------------------------
# Smuggling

my %smuggled = (
    'CR LF in a value'         => '{"x": "a\r\nEvil: S3cret"}',
    'LF in a value'            => '{"x": "a\nS3cret"}',
    'CR in a value'            => '{"x": "S3cret\r"}',
    'a control character'      => '{"x": "S3cret\u0001"}',
    'DEL'                      => '{"x": "S3cret\u007f"}',
    'CR LF in a name'          => '{"x\r\nEvil: S3cret": "a"}',
    'a space in a name'        => '{"x S3cret": "a"}',
    'a colon in a name'        => '{"S3cret:": "a"}',
    'an empty name'            => '{"": "S3cret"}',
    'a name beyond ASCII'      => '{"S3cret\u00e4": "a"}',
    'Host'                     => '{"Host": "S3cret"}',
    'Content-Length'           => '{"content-length": "S3cret"}',
    'Content-Type'             => '{"Content-Type": "S3cret"}',
    'Transfer-Encoding'        => '{"TRANSFER-ENCODING": "S3cret"}',
    'Connection'               => '{"Connection": "S3cret"}',
    'Expect'                   => '{"Expect": "S3cret"}',
    'Idempotency-Key'          => '{"idempotency-key": "S3cret"}',
    'Authorization'            => '{"Authorization": "S3cret"}',
    'Proxy-Authorization'      => '{"proxy-authorization": "S3cret"}',
    'ce-id'                    => '{"CE-Id": "S3cret"}',
    'ce-anything'              => '{"ce-anything": "S3cret"}',
    'outbox-event-id'          => '{"outbox-event-id": "S3cret"}',
    'webhook-signature'        => '{"webhook-signature": "S3cret"}',
    'one bad among good ones'  => '{"a": "b", "c": "d", "host": "S3cret", "z": "y"}',
    'a number'                 => '{"x": 4711}',
    'true'                     => '{"x": true}',
    'null'                     => '{"x": null}',
    'an object'                => '{"x": {"y": "S3cret"}}',
    'an array of strings'      => '{"x": ["S3cret"]}',
    'an array'                 => '["S3cret"]',
    'an array of objects'      => '[{"x": "S3cret"}]',
    'a string'                 => '"S3cret"',
    'a JSON null'              => 'null',
);

subtest 'a writer cannot forge a header, nor hold up others by trying' => sub {
    settle();
    my @names = sort keys %smuggled;
    # A good event before and behind each bad one, of the same aggregate; all in one transaction.
    sql('BEGIN; '
        . join(' ', map {
            my $insert = 'INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers) VALUES '
              . '(\'order\', ' . quote($_) . ', \'%s\', \'{}\', %s);';
            sprintf("$insert $insert $insert", 'good', 'NULL', 'bad', quote($smuggled{$_}), 'good', 'NULL')
        } @names)
        . ' COMMIT');
    $receiver->wait_requests(2 * @names, { 'ce-type' => 'good' }, desc => 'the events around it arrive');
    wait_drained($node);
    is($receiver->requests, 2 * @names, 'the others do not');
    is($receiver->counts->{malformed}, 0, 'no request was malformed');
    is_deeply([ $receiver->log(sub { $_->{head} =~ /S3cret|evil/i }) ], [], 'nothing of them was sent');
    is(count_dead($node), scalar @names, 'each is a dead letter, and visible');
    is(sql(q(SELECT string_agg(aggregate_id, ', ') FROM outbox_dead_letters WHERE event_type <> 'bad')), '', '... only they');
    is(sql(q(SELECT string_agg(aggregate_id, ', ') FROM outbox_dead_letters WHERE attempts <> 0)), '', '... at once, without attempts');
    is(sql(q(SELECT string_agg(aggregate_id, ', ') FROM outbox_dead_letters WHERE coalesce(last_error, '') = '')), '', '... with a reason');
    is(sql(q(SELECT string_agg(last_error, ', ') FROM outbox_dead_letters WHERE last_error ~* 'S3cret|evil|4711')), '',
        '... that does not repeat what it refuses');
    unlike(log_since($node, 0) =~ s/STATEMENT:.*//gr, qr/S3cret/, '... nor does the server log');
};

# ---------------------------------------------------------------------------------------------------------
# The URL

subtest 'each event goes where its names say, and nowhere else' => sub {
    sql('DELETE FROM outbox_events');
    settle('outbox.endpoint' => $receiver->url('/v1/{aggregate_type}/x-{event_type}/in?id={aggregate_id}&t={event_type}'));
    my %want;
    for my $names (
        [ 'order', '42', 'order.created' ], [ "gr\xc3\xb6\xc3\x9fe", 'a b&c=d#e?f+g/h\\i', 'x%2e;y:@' ], [ 'a.b', '../..', '...' ],
        [ 'order', '{aggregate_type}', 'e' ])
    {
        my $id = sql('SELECT outbox_publish(' . join(', ', map { quote($_) } @$names) . ', \'{}\')');
        my ($type, $aggregate, $event) = map { s/([^A-Za-z0-9._~-])/sprintf '%%%02X', ord $1/ger } @$names;
        $want{$id} = "/v1/$type/x-$event/in?id=$aggregate&t=$event";
    }
    $receiver->wait_requests(scalar keys %want);
    is_deeply({ map { $receiver->event_id($_), $_->{path} } $receiver->log }, \%want, 'placeholders are percent-encoded');
    wait_drained($node);

    $receiver->clear_log;
    my @bad = ('.', '..', '../admin', 'a/b', 'a\\b', '%2e%2e', '%2E.', '%252e%252e', 'a%2Fb', '%5c', '%255C');
    sql(join ' ', map { 'SELECT outbox_publish(' . quote($_) . q[, 'bad', 'e', '{}');] } @bad);
    sql(q(SELECT outbox_publish('good', 'good', 'e', '{}')));
    $receiver->wait_requests(1, desc => 'a good name arrives');
    wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_dead_letters', scalar @bad,
        desc => 'names that would lead to another path are dead letters at once');
    wait_drained($node);
    is_deeply([ map { $_->{path} } $receiver->log ], ['/v1/good/x-e/in?id=good&t=e'], '... and are not sent');
    is(sql(q(SELECT count(*) FROM outbox_dead_letters WHERE coalesce(last_error, '') = '' OR attempts <> 0
             OR last_error LIKE '%' || aggregate_type || '%' AND length(aggregate_type) > 2)), 0, '... with a reason that does not repeat them');
};

done_testing();
