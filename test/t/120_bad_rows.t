# One bad row, one result that cannot be recorded, one enormous payload: none of them holds up the rest, is sent again
# and again, or passes in silence.

use strict;
use warnings;

use Digest::SHA qw(sha256_hex);
use JSON::PP;
use PostgreSQL::Test::Utils qw(slurp_file);
use Test::More;

use OutboxTest;

my $receiver = start_receiver(store_body => 65_536);
my $node     = new_node(
    'main',
    receiver => $receiver,
    fast     => 1,
    conf     => {
        'autovacuum'                 => 'off',
        'shared_buffers'             => '8MB',
        'outbox.max_in_flight_bytes' => '8MB',
        'outbox.retry_base'          => '2h',
        'outbox.retry_cap'           => '2h',
        'outbox.max_attempts'        => 3,
    });
create_extension($node);
wait_workers($node, 1);

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

# Events, each in an aggregate of its own if nothing else is said; columns are SQL expressions.
my $aggregates = 0;

sub insert
{
    my @statements;
    for my $given (@_)
    {
        my %column = (aggregate_type => q('order'), aggregate_id => q('a) . ++$aggregates . q('), event_type => q('e'), payload => q('{}'), %$given);
        my @names = sort keys %column;
        push @statements, sprintf 'INSERT INTO outbox_events (%s) VALUES (%s) RETURNING id;', join(', ', @names), join(', ', @column{@names});
    }
    my @ids = split /\n/, sql("BEGIN; @statements COMMIT");
    return wantarray ? @ids : $ids[0];
}

sub rows
{
    my $text = sql('SELECT coalesce(jsonb_object_agg(id, to_jsonb(e) - \'payload\' || jsonb_build_object(\'state\', outbox_state(e))), \'{}\') FROM outbox_events e');
    return JSON::PP->new->utf8->decode($text);
}

sub requests { my ($id) = @_; return $receiver->count({ 'ce-id' => $id }) }

sub in { my (@ids) = @_; return 'id IN (' . join(', ', map { "'$_'" } @ids) . ')' }

sub wait_delivered
{
    my ($name, @ids) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL AND ' . in(@ids), scalar @ids, desc => $name);
}

sub wait_state
{
    my ($state, $name) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_sql($node, 'postgres', 'SELECT state FROM outbox_status', $state, desc => $name);
}

sub wait_polls
{
    my ($n) = @_;
    my $count  = 'SELECT sum(wakeups_poll) FROM outbox_workers()';
    my $before = sql($count);
    return wait_for("$n polls", sub { sql($count) >= $before + $n }, quiet => 1);
}

my $resident = sub {
    my ($pid, $what) = @_;
    my ($kb) = slurp_file("/proc/$pid/status") =~ /^$what:\s+([0-9]+) kB/m;
    return $kb / 1024;
};

# ---------------------------------------------------------------------------------------------------------
# Memory; first, as long as the worker is small

subtest 'a pile of large payloads does not fill the memory' => sub {
    # While they are written nothing is to be sent: the worker is to meet them all at once.
    reload($node, 'outbox.endpoint' => '');
    my ($pid) = worker_pids($node);
    my $before = $resident->($pid, 'VmRSS');
    my $n = 200;
    sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) "
          . "SELECT 'large', i::text, 'e', jsonb_build_object('text', repeat(md5(i::text), 32768)) FROM generate_series(1, $n) i");
    reload($node, 'outbox.endpoint' => $receiver->url('/'));
    wait_drained($node, timeout => 120);
    is_deeply([ worker_pids($node) ], [$pid], 'one worker has done it');
    my $most = $resident->($pid, 'VmHWM');
    cmp_ok($most - $before, '<', 64, "$n payloads of 1 MB with max_in_flight_bytes = 8MB: its memory grew by less than 64 MB")
      or diag "from $before to $most MB";
    is($receiver->requests, $n, 'each was sent once');
    my @wrong = grep { ($_->{body_length} // 0) < 1_048_576 } $receiver->log;
    is(scalar @wrong, 0, '... whole');
};

subtest 'one payload larger than all that may be held goes through, and so do the others' => sub {
    reload($node, 'outbox.max_in_flight_bytes' => '256kB');
    sql('TRUNCATE outbox_events');
    $receiver->clear_log;
    my ($large, @small) = insert(
        { payload => q(jsonb_build_object('text', (SELECT string_agg(md5(i::text), '' ORDER BY i) FROM generate_series(1, 655360) i))) },
        map { {} } 1 .. 50);
    my $other = insert({ aggregate_type => q('other') });
    wait_delivered('20 MB with max_in_flight_bytes = 256kB, the small ones behind it, and another lane', $large, @small, $other);
    my ($sent, @more) = $receiver->log({ 'ce-id' => $large });
    is(scalar @more, 0, 'it was sent once');
    is("$sent->{body_length} " . ($sent->{body_sha256} // ''),
        sql("SELECT octet_length(payload::text) || ' ' || encode(sha256(convert_to(payload::text, 'UTF8')), 'hex') FROM outbox_events WHERE id = '$large'"),
        '... byte for byte');
    reload($node, 'outbox.max_in_flight_bytes' => undef);
};

# ---------------------------------------------------------------------------------------------------------
# Results that cannot be recorded

# While results of @$bad cannot be recorded: others are, nothing is sent twice, the status says so; $mend mends it.
sub unrecordable
{
    my (%opt) = @_;
    my @bad   = @{ $opt{bad} };
    my @behind = insert(map { { aggregate_id => "(SELECT aggregate_id FROM outbox_events WHERE id = '$_')" } } @bad);
    my @good  = insert(map { {} } 1 .. 20);
    wait_delivered('others are recorded', @good);
    wait_state($opt{state} // 'results cannot be recorded', 'the status says so');
    like(sql('SELECT last_error FROM outbox_status'), $opt{error}, '... and why') if $opt{error};
    my @later = insert(map { {} } 1 .. 20);
    wait_delivered('... later ones, too', @later);
    wait_polls(3);
    is_deeply([ map { requests($_) } @bad ], [ map { 1 } @bad ], 'what cannot be recorded is not sent again');
    is_deeply([ map { requests($_) } @behind ], [ map { 0 } @bad ], '... nor anything behind it');
    is_deeply([ grep { requests($_) != 1 } @good, @later ], [], 'nothing else is sent twice');
    is(sql('SELECT count(*) FROM outbox_events WHERE processed_at IS NULL AND attempts = 0 AND ' . in(@bad)), scalar @bad, 'the rows are as they were');
    sql($opt{mend});
    return @behind;
}

subtest 'a trigger that raises for one row: the others are recorded, that event is not sent for ever' => sub {
    $receiver->clear_log;
    sql(q[
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.aggregate_id = 'refused' THEN RAISE EXCEPTION 'no update of %', NEW.aggregate_id; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION refuse();
    ]);
    my ($bad) = insert({ aggregate_id => q('refused') });
    my @behind = unrecordable(bad => [$bad], error => qr/no update of refused/, mend => 'DROP TRIGGER refuse ON outbox_events');
    wait_delivered('without the trigger it is recorded, and the next of its aggregate goes out', $bad, @behind);
    is_deeply([ map { requests($_) } $bad, @behind ], [ 1, 1 ], '... without being sent again');
    wait_state('ok', 'the status is ok again');
};

subtest 'a constraint that one success and one failure violate' => sub {
    $receiver->clear_log;
    $receiver->rule(with => { 'ce-type' => '^fails$' }, status => 500, body => 'poison');
    sql(q[
        ALTER TABLE outbox_events ADD CONSTRAINT never CHECK (aggregate_id <> 'unhappy' OR processed_at IS NULL),
            ADD CONSTRAINT no_poison CHECK (last_error NOT LIKE '%poison%');
    ]);
    my @bad = insert({ aggregate_id => q('unhappy') }, { event_type => q('fails') });
    my @behind = unrecordable(bad => \@bad, error => qr/never|poison/, mend => 'ALTER TABLE outbox_events DROP CONSTRAINT never, DROP CONSTRAINT no_poison');
    wait_sql($node, 'postgres', "SELECT string_agg((processed_at IS NOT NULL) || ' ' || attempts, ',' ORDER BY seq) FROM outbox_events WHERE " . in(@bad),
        'true 0,false 1', desc => 'without the constraints both are recorded');
    wait_delivered('... the next goes out', $behind[0]);
    is_deeply([ map { requests($_) } @bad ], [ 1, 1 ], '... without being sent again');
    is(requests($behind[1]), 0, 'behind the failing one nothing does');
    wait_state('ok', 'the status is ok again');
    $receiver->clear_rules;
    sql('DELETE FROM outbox_events WHERE processed_at IS NULL');
};

subtest 'a trigger that swallows the update of one row is not passed over in silence' => sub {
    $receiver->clear_log;
    sql(q[
        CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
        CREATE TRIGGER swallow BEFORE UPDATE ON outbox_events FOR EACH ROW WHEN (NEW.aggregate_id = 'swallowed') EXECUTE FUNCTION swallow();
    ]);
    my ($bad) = insert({ aggregate_id => q('swallowed') });
    my @behind = unrecordable(bad => [$bad], mend => 'DROP TRIGGER swallow ON outbox_events');
    wait_delivered('without the trigger it is recorded', $bad, @behind);
    is(requests($bad), 1, '... without being sent again');
    wait_state('ok', 'the status is ok again');
    sql('TRUNCATE outbox_events');    # whatever became of them
};

subtest 'when nothing at all can be recorded, sending stops and status says why' => sub {
    $receiver->clear_log;
    reload($node, 'outbox.batch_size' => 20);
    my $n = 2000;
    my $offset = log_offset($node);
    sql(q[
        CREATE FUNCTION refuse_all() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'nothing goes'; END $$;
        CREATE TRIGGER refuse_all BEFORE UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION refuse_all();
    ]);
    sql("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', 'n' || i, 'e', '{}' FROM generate_series(1, $n) i");
    wait_state('results cannot be recorded', 'the status says so');
    like(sql('SELECT last_error FROM outbox_status'), qr/nothing goes/, '... and why');
    my $requests;
    wait_for('sending stops', sub { my $before = $requests // -1; wait_polls(2); $requests = $receiver->requests; return $requests == $before });
    cmp_ok($requests, '<', $n / 4, "not all of $n events are sent in vain");
    my $log   = log_since($node, $offset);
    my @lines = $log =~ /cannot be recorded/g;
    my ($from, $to) = ($log =~ /\A\S+ (\S+)/, $log =~ /.*^\S+ ([0-9:.]+) UTC/ms);
    my ($begin, $end) = map { my ($h, $m, $s) = split /:/; $h * 3600 + $m * 60 + $s } $from, $to;
    cmp_ok(scalar @lines, '<=', 10 * ($end - $begin + 2), 'the log has not a line for each') or diag @lines . ' lines in ' . ($end - $begin) . ' s';
    sql('DROP TRIGGER refuse_all ON outbox_events');
    wait_drained($node, timeout => 90);
    is_deeply([ $receiver->duplicates ], [], 'when it goes again, nothing is sent twice');
    wait_state('ok', 'the status is ok again');
    reload($node, 'outbox.batch_size' => undef);
};

# ---------------------------------------------------------------------------------------------------------
# Rows with strange contents

subtest 'dates beyond all dates' => sub {
    sql('TRUNCATE outbox_events');
    $receiver->clear_log;
    my @dates = ('infinity', '-infinity', '4000-01-01 BC', '0001-01-01Z', '9999-12-31 23:59:59.999999Z', '10000-01-01Z', '294276-12-31');
    my @more  = ('2024-02-29 12:00:00.5Z');
    my @ids   = insert(map { { created_at => "'$_'" } } @dates, @more);
    wait_delivered('all are delivered', @ids);
    my %time = map { $dates[$_] => ($receiver->log({ 'ce-id' => $ids[$_] }))[0]{headers}{'ce-time'} } 0 .. $#dates;
    is_deeply([ map { $time{$_} } @dates ],
        [ undef, undef, undef, ['0001-01-01T00:00:00.000000Z'], ['9999-12-31T23:59:59.999999Z'], undef, undef ],
        'ce-time where RFC 3339 has a word for it');

    $receiver->hang(with => { 'ce-type' => '^hangs$' }, times => 2);
    insert({ created_at => q('-infinity'), event_type => q('hangs') }, { created_at => q('infinity'), event_type => q('hangs') });
    $receiver->wait_hung(2);
    is(sql('SELECT state, pending, oldest_pending FROM outbox_status'), 'ok|2|', 'outbox_status bears dates without end');
    $receiver->release;
    wait_drained($node);
    $receiver->clear_rules;
};

subtest 'names that are empty, or anything but names' => sub {
    $receiver->clear_log;
    my @names = ('', ' ', q(a"b), "a\x01b", "line\r\nbreak", '../..', '%2e', '{aggregate_id}', 'x' x 100, "\xc3\xbc" x 100, "\xf0\x9f\x98\x80", q(\\'; DROP TABLE x; --));
    my @values = map { 'E' . q(') . s/([\\'])/\\$1/gr . q(') } @names;
    my @ids = insert(
        (map { { aggregate_id   => $_ } } @values),
        (map { { aggregate_type => $_ } } @values),
        (map { { event_type     => $_ } } @values),
        { aggregate_type => q(''), aggregate_id => q(''), event_type => q('') });
    wait_delivered('all are delivered', @ids);
    is_deeply([ grep { requests($_) != 1 } @ids ], [], '... once');
    is($receiver->count(sub { $_->{malformed} }), 0, '... as valid HTTP');

    # Waits behind nothing, as after a head that was deleted by hand.
    my @parked = insert(
        { aggregate_id => q('parked'), retry_after => q('-infinity') },
        { aggregate_type => q(''), aggregate_id => q('parked'), retry_after => q('-infinity') },
        { aggregate_type => q(''), aggregate_id => q(''), retry_after => q('-infinity') });
    wait_delivered('a parked event without a head is found', @parked[ 0, 1 ]);
    wait_sql($node, 'postgres', "SELECT processed_at IS NOT NULL FROM outbox_events WHERE id = '$parked[2]'", 't',
        timeout => 10, desc => '... even where both names are empty');
    sql("DELETE FROM outbox_events WHERE processed_at IS NULL");
};

subtest 'headers that cannot be sent: dead at once, with a reason, and nobody waits' => sub {
    sql('TRUNCATE outbox_events');
    $receiver->clear_log;
    my %dead = (
        array  => '["a"]',     string => '"x"',                number   => '1',               null => 'null',   boolean => 'true',
        nested => '{"a": {}}', list   => '{"a": ["b"]}',       integer  => '{"a": 1}',        void => '{"a": null}',
        noname => '{"": "x"}', space  => '{"a b": "c"}',       colon    => '{"a:": "b"}',     name => '{"s\\r\\nx-evil": "s3cret"}',
        crlf   => '{"a": "s3cret\\r\\nx-evil: 1"}',            tab      => '{"a": "b\\u0001"}', umlaut => '{"\u00fc": "b"}',
        host   => '{"Host": "s3cret"}', length => '{"content-length": "1"}', chunked => '{"Transfer-Encoding": "chunked"}',
        id     => '{"ce-id": "s3cret"}', key => '{"Idempotency-Key": "s3cret"}', auth => '{"Authorization": "s3cret"}',
        replay => '{"outbox-replay": 1}', outbox => '{"outbox-event-id": "s3cret"}',
    );
    my %sent = (
        none   => [ 'NULL', {} ],
        empty  => [ q('{}'), {} ],
        value  => [ q('{"x-empty": ""}'), { 'x-empty' => [''] } ],
        odd    => [ q('{"X-Odd_1.~": " a, b; c=\"d\" "}'), { 'x-odd_1.~' => [ 'a, b; c="d"' ] } ],
        utf8   => [ q('{"x-name": "\u00fc\u20ac"}'), { 'x-name' => ["\xc3\xbc\xe2\x82\xac"] } ],
        trace  => [ q('{"traceparent": "00-1-2-01", "tenant": "7"}'), { traceparent => ['00-1-2-01'], tenant => ['7'] } ],
        large  => [ q(jsonb_build_object('x-large', repeat('x', 60000))), { 'x-large' => [ 'x' x 60_000 ] } ],
        many   => [ q((SELECT jsonb_object_agg('x-' || i, i::text) FROM generate_series(1, 500) i)), { map { ("x-$_" => [$_]) } 1 .. 500 } ],
    );
    my @dead = sort keys %dead;
    my @sent = sort keys %sent;
    # All in one aggregate: a dead one is no obstacle.
    my @ids = insert(
        (map { { aggregate_id => q('one'), event_type => "'$_'", headers => "'$dead{$_}'" } } @dead),
        (map { { aggregate_id => q('one'), event_type => "'$_'", headers => $sent{$_}[0] } } @sent));
    my %id;
    @id{ @dead, @sent } = @ids;
    wait_drained($node);
    my $rows = rows();
    for my $kind (@dead)
    {
        my $row = $rows->{ $id{$kind} };
        is("$row->{state} $row->{attempts} " . requests($id{$kind}), 'dead 0 0', "$kind: dead, not sent");
        like($row->{last_error}, qr/header/, '... for a reason');
        unlike($row->{last_error}, qr/s3cret|evil/, '... that does not repeat the value');
    }
    for my $kind (@sent)
    {
        is($rows->{ $id{$kind} }{state}, 'delivered', "$kind: delivered");
        my ($sent) = $receiver->log({ 'ce-id' => $id{$kind} });
        my $expected = $sent{$kind}[1];
        is_deeply({ map { $_ => $sent->{headers}{$_} } keys %$expected }, $expected, '... with its headers');
    }
    is($receiver->count({ 'x-evil' => qr/./ }), 0, 'no header came in by the back door');
    is($receiver->count(sub { $_->{malformed} }), 0, 'all was valid HTTP');
    $receiver->clear_log;
};

subtest 'payloads that are hardly any' => sub {
    my @payloads = ('null', 'true', '0', '-0', '""', '[]', '{}', '1e-300', '"\u0001\u2028\\\\"', '12345678901234567890.12345678901234567890', '[null]', '{"": ""}', '"' . "\xf0\x9f\x98\x80" . '"');
    my @ids = insert((map { { payload => "'$_'" } } @payloads), { payload => q(('1' || repeat('0', 2000))::jsonb) },
        { payload => q((repeat('[', 1000) || repeat(']', 1000))::jsonb) });
    wait_delivered('all are delivered', @ids);
    my %text = map { split /\|/, $_, 2 } split /\n/, sql('SELECT id, payload::text FROM outbox_events WHERE ' . in(@ids));
    is_deeply({ map { $_ => ($receiver->log({ 'ce-id' => $_ }))[0]{body} } @ids }, \%text, 'the body is payload::text, byte for byte');
};

subtest 'columns that a user adds' => sub {
    $receiver->clear_log;
    $receiver->hang(with => { 'ce-type' => '^hangs$' }, times => 2);
    my ($ok, $bad) = insert({ event_type => q('hangs') }, { event_type => q('hangs') });
    $receiver->wait_hung(2);
    sql(q[
        ALTER TABLE outbox_events
            ADD COLUMN tenant text DEFAULT current_user, ADD COLUMN tid int DEFAULT 7, ADD COLUMN i text, ADD COLUMN "n" text DEFAULT 'x',
            ADD COLUMN error text, ADD COLUMN replay bool DEFAULT true, ADD COLUMN "locked_by" text, ADD COLUMN gone int,
            ADD COLUMN size int GENERATED ALWAYS AS (length(aggregate_id)) STORED,
            ADD COLUMN delivered bool GENERATED ALWAYS AS (processed_at IS NOT NULL) STORED,
            ADD COLUMN large text DEFAULT repeat('x', 3000);
        ALTER TABLE outbox_events DROP COLUMN gone;
        CREATE INDEX ON outbox_events (tenant) WHERE processed_at IS NULL;
        CREATE INDEX ON outbox_events (processed_at);
    ]);
    my @hung = map { $_->{index} } map { $receiver->log({ 'ce-id' => $_ }) } $ok, $bad;
    $receiver->release(index => $hung[0]);
    $receiver->release(index => $hung[1], status => 500);
    wait_delivered('what was in flight is recorded', $ok);
    wait_sql($node, 'postgres', "SELECT attempts FROM outbox_events WHERE id = '$bad'", 1, desc => '... failures, too');
    my @ids = insert({ tenant => q('t'), i => q('i') }, { aggregate_id => q('abc'), error => q('e'), replay => 'false' });
    wait_delivered('new events are delivered', @ids);
    is(sql("SELECT size, delivered, tid FROM outbox_events WHERE id = '$ids[1]'"), '3|t|7', 'generated columns follow');
    is(sql("SELECT outbox_state(e) FROM outbox_events e WHERE id = '$bad'"), 'waiting', 'outbox_state() knows such a row');
    sql("UPDATE outbox_events SET retry_after = 'infinity' WHERE id = '$bad'");
    is(sql("SELECT count(*) FROM outbox_dead_letters WHERE id = '$bad'"), 1, 'outbox_dead_letters, too');
    is(sql("SELECT outbox_replay('$bad')"), 't', '... and outbox_replay()');
    wait_drained($node);
    $receiver->clear_rules;
};

# ---------------------------------------------------------------------------------------------------------
# Rows that cannot be read

sql('TRUNCATE outbox_events');
sql('ALTER TABLE outbox_events ALTER payload SET STORAGE EXTERNAL, ALTER headers SET STORAGE EXTERNAL');
my ($lost_payload, $lost_headers) = insert(
    { payload => q(jsonb_build_object('text', repeat(md5('a'), 1000))), retry_after => q('2999-01-01') },
    { headers => q(jsonb_build_object('x-text', repeat(md5('b'), 1000))), retry_after => q('2999-01-01') });

# What both keep outside of the row is wiped off the disk.
my ($file, $pages) = split /\|/, sql(q[
    CHECKPOINT;
    SELECT pg_relation_filepath(reltoastrelid), pg_relation_size(reltoastrelid) / 8192 FROM pg_class WHERE oid = 'outbox_events'::regclass]);
cmp_ok($pages, '>', 0, 'large values are outside of the row');
$node->stop;
open my $fh, '+<', $node->data_dir . "/$file" or die "$file: $!";
binmode $fh;
print {$fh} "\0" x (8192 * $pages);
close $fh or die "$file: $!";
$node->start;
wait_workers($node, 1);

for my $lost ([ payload => $lost_payload ], [ headers => $lost_headers ])
{
    my ($column, $id) = @$lost;
    subtest "$column that the disk has lost: that event fails, the others go" => sub {
        $receiver->clear_log;
        my ($ret, undef, $error) = $node->psql('postgres', "SELECT $column FROM outbox_events WHERE id = '$id'");
        like($error, qr/missing chunk/, 'it cannot be read');

        my @behind = insert({ aggregate_id => "(SELECT aggregate_id FROM outbox_events WHERE id = '$id')" });
        my @good = insert(map { {} } 1 .. 20);
        sql("UPDATE outbox_events SET retry_after = NULL WHERE id = '$id'");
        my @late = insert(map { {} } 1 .. 20);
        wait_delivered('the others are delivered', @good, @late);
        for my $n (1 .. 3)
        {
            wait_sql($node, 'postgres', "SELECT attempts FROM outbox_events WHERE id = '$id'", $n, desc => "it fails like any other: attempt $n");
            like(sql("SELECT last_error FROM outbox_events WHERE id = '$id'"), qr/missing chunk/, '... for a reason');
            sql("UPDATE outbox_events SET retry_after = now() WHERE id = '$id'") if $n < 3;
        }
        is(sql("SELECT count(*) FROM outbox_events WHERE retry_after = 'infinity' AND id = '$id'"), 1, 'at the limit it is a dead letter');
        wait_delivered('... and what is behind it goes', @behind);
        is(requests($id), 0, '... it was never sent');
        is_deeply([ $receiver->duplicates ], [], 'nothing was sent twice because of it');
        wait_state('ok', 'the status is ok');
    };
}

is(scalar(worker_pids($node)), 1, 'the worker is still there');
unlike(log_since($node, 0), qr/PANIC|FATAL:  (?!the database system)|was terminated/, 'and nothing crashed on the way');

done_testing();
