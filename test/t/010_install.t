# CREATE EXTENSION: before the library is preloaded and after, in any schema, and by whom not.

use strict;
use warnings;

use Test::More;

use OutboxTest;

my $receiver = start_receiver();
my $node     = new_node(
    'main',
    receiver => $receiver,
    preload  => 0,
    conf     => { 'outbox.poll_interval' => '1h' });

my $hint = qr/HINT:.*shared_preload_libraries/;

sub sql { my ($query, $db) = @_; return $node->safe_psql($db // 'postgres', $query) }

sub sql_as
{
    my ($role, $query, $db) = @_;
    return $node->psql($db // 'postgres', $query, extra_params => [ '-U', $role ]);
}

# One event written the way a hand-written outbox does it; its id.
sub write_event
{
    my ($table, $aggregate, $n, $db) = @_;
    return sql(
        "INSERT INTO $table (aggregate_type, aggregate_id, event_type, payload) "
          . "VALUES ('order', '$aggregate', 'order.created', '{\"n\": $n}') RETURNING id",
        $db);
}

# ---------------------------------------------------------------------------------------------------------
# Not preloaded

my ($ret, $out, $err) = $node->psql('postgres', 'CREATE EXTENSION outbox');
is($ret, 0, 'CREATE EXTENSION does not fail where the library is not preloaded');
like($err, qr/WARNING:.*relay is not running/, 'nobody is left to believe that events are being sent: a warning');
like($err, $hint, '... whose hint says which line is missing');
unlike($err, qr/ERROR|FATAL/, '... and nothing worse');

my @ids = map { write_event('outbox_events', 'a', $_) } 1 .. 3;
is(scalar @ids, 3, 'a writer does not fail because the library is not preloaded');
push @ids, sql(q(SELECT outbox_publish('order', 'a', 'order.created', '{"n": 4}', '{"traceparent": "00-1"}')));
like($ids[3], qr/^[0-9a-f-]{36}$/, '... nor does outbox_publish()');

($ret, $out, $err) = $node->psql('postgres',
    'BEGIN; ' . q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 'x', 'e', '{}'); )
      . 'ROLLBACK');
is("$ret$err", '0', '... nor does a rollback');

subtest 'nothing lies about a relay that is not there' => sub {
    is(sql('SELECT state, workers, pending, dead, in_flight, last_error IS NULL, oldest_pending >= interval \'0\', since IS NULL FROM outbox_status'),
        'not preloaded|0|4|0|0|t|t|t', 'outbox_status names the cause and counts what waits');
    is(sql('SELECT state, workers, in_flight, last_error, since FROM outbox_relay()'), 'not preloaded|0|0||',
        'outbox_relay()');
    is(sql('SELECT count(*) FROM outbox_workers()'), 0, 'outbox_workers() has no row');
    is(sql('SELECT string_agg(DISTINCT outbox_state(e), \',\') FROM outbox_events e'), 'ready',
        'outbox_state(): the events are ready');
    is(sql('SELECT count(*) FROM outbox_dead_letters'), 0, 'outbox_dead_letters is empty');
    is(sql('SELECT outbox_wake()'), '', 'outbox_wake() does no harm');
    is(sql("SELECT outbox_replay('$ids[0]')"), 'f', 'outbox_replay() of a pending event: false');
    is(sql('SELECT outbox_replay(gen_random_uuid())'), 'f', '... of an unknown one: false');
    is(sql('SELECT outbox_replay(NULL)'), 'f', '... of null: false');
    is(sql("SELECT outbox_accept('$ids[0]')"), 't', 'outbox_accept(): the first time true');
    is(sql("SELECT outbox_accept('$ids[0]')"), 'f', '... the second false');
    is(sql('SELECT count(*) FROM processed_events'), 1, '... and once in processed_events');

    sql("UPDATE outbox_events SET retry_after = 'infinity', attempts = 10 WHERE id = '$ids[0]'");
    is(sql('SELECT id FROM outbox_dead_letters'), $ids[0], 'a dead letter is shown');
    is(sql('SELECT pending, dead FROM outbox_status'), '3|1', '... counted');
    is(sql("SELECT outbox_replay('$ids[0]')"), 't', '... and can be replayed');
    is(sql("SELECT outbox_state(e), attempts, headers FROM outbox_events e WHERE id = '$ids[0]'"),
        'ready|0|{"outbox-replay": "true"}', '... which makes it ready again');
    is(sql('SELECT outbox_wake(); SHOW outbox.format'), "\ncloudevents", 'the settings are there once a function was called');
};

subtest 'listeners are not left out where the library is not preloaded' => sub {
    reload($node, 'outbox.notify' => 'on');
    (undef, $out) = $node->psql('postgres',
        q(LISTEN outbox_event; SELECT outbox_publish('order', 'a', 'order.created', '{"n": 5}')),
    );
    push @ids, $out =~ /^([0-9a-f-]{36})$/m;
    like($out, qr/notification "outbox_event" with payload "$ids[4]"/, 'outbox.notify = on sends the id');
    reload($node, 'outbox.notify' => undef);
};

# DROP EXTENSION and a second try, where nothing was loaded in the session yet.
sql('CREATE DATABASE twice');
sql('CREATE EXTENSION outbox; SELECT outbox_publish(\'order\', \'a\', \'e\', \'{}\')', 'twice');
sql('DROP EXTENSION outbox', 'twice');
is(sql('SELECT to_regclass(\'outbox_events\') IS NULL', 'twice'), 't', 'DROP EXTENSION leaves no table behind');
($ret, $out, $err) = $node->psql('twice', 'CREATE EXTENSION outbox');
is($ret, 0, '... and does not stand in the way of the next CREATE EXTENSION');
like($err, $hint, '... which says again what is missing');

is($receiver->connections, 0, 'nothing was sent without a relay');

# ---------------------------------------------------------------------------------------------------------
# Preloaded

set_conf($node, shared_preload_libraries => 'outbox');
$node->restart;
$receiver->wait_requests(5, desc => 'what waited for the library is not lost: it arrives after the restart');
wait_drained($node);
is_deeply([ $receiver->ids ], \@ids, '... in order of insertion');
is_deeply([ $receiver->duplicates ], [], '... once each');
is($receiver->count({ 'outbox-replay' => 'true' }), 1, '... the replayed one marked');
is($receiver->count({ traceparent => '00-1' }), 1, '... with its headers');
wait_sql($node, 'postgres', 'SELECT state, workers, pending, dead, in_flight, oldest_pending IS NULL, since IS NOT NULL FROM outbox_status',
    'ok|1|0|0|0|t|t', desc => 'outbox_status says ok');

($ret, $out, $err) = $node->psql('template1', 'SELECT 1');
wait_workers($node, 1, db => 'twice', desc => 'the other database has its worker, too');

# CREATE EXTENSION starts the relay by itself: no restart, no poll.
my $number = 0;
for my $schema ('s', 'My Events', 'Größe.x;')
{
    my $db = 'schema_' . ++$number;
    $receiver->clear_log;
    create_db($node, $db);
    ($ret, $out, $err) = $node->psql($db,
        qq(CREATE SCHEMA "$schema"; CREATE EXTENSION outbox SCHEMA "$schema"));
    is("$ret$err", '0', "CREATE EXTENSION does not fail in schema $schema");
    my $id = write_event(qq("$schema".outbox_events), 'a', 1, $db);
    $receiver->wait_requests(1, desc => "an event in schema $schema does not wait for a restart or a poll");
    is_deeply([ $receiver->ids ], [$id], '... it is the right one');
    wait_sql($node, $db, qq(SELECT outbox_state FROM (SELECT "$schema".outbox_state(e) FROM "$schema".outbox_events e) s),
        'delivered', desc => '... its success is recorded');
    is(sql(qq(SELECT state, pending FROM "$schema".outbox_status), $db), 'ok|0', '... the status answers there');
    my $published = sql(qq(SELECT "$schema".outbox_publish('order', 'a', 'e', '{}')), $db);
    $receiver->wait_requests(2, desc => '... outbox_publish() works there');
    wait_sql($node, $db, qq(SELECT count(*) FROM "$schema".outbox_events WHERE processed_at IS NULL), 0,
        desc => '... and is recorded');
    is(sql(qq(SELECT "$schema".outbox_replay('$published')), $db), 't', '... outbox_replay(), too');
    $receiver->wait_requests(3, desc => '... and what it replays arrives');
    is(sql(qq(SELECT "$schema".outbox_accept('$published')), $db), 't', '... outbox_accept(), too');
    is(sql(q(SELECT count(*) FROM pg_class WHERE relname LIKE 'outbox%' AND relnamespace = 'public'::regnamespace), $db),
        0, '... and nothing lies in another schema');
}

subtest 'a schema whose name means something to format() is no obstacle' => sub {
    create_db($node, 'percent');
    ($ret, $out, $err) = $node->psql('percent', 'CREATE SCHEMA "100%s"; CREATE EXTENSION outbox SCHEMA "100%s"');
    is("$ret$err", '0', 'CREATE EXTENSION works');
    $receiver->clear_log;
    ($ret) = $node->psql('percent', q(SELECT "100%s".outbox_publish('order', 'a', 'e', '{}')));
    is($ret, 0, 'an event can be written') or return;
    $receiver->wait_requests(1, desc => 'it arrives');
};

# ---------------------------------------------------------------------------------------------------------
# Going and coming

create_db($node, 'later');
create_extension($node, 'later');
wait_workers($node, 1, db => 'later', desc => 'the worker of a new database');
sql('DROP EXTENSION outbox', 'later');
wait_workers($node, 0, db => 'later', desc => 'no worker stays behind after DROP EXTENSION');
($ret, $out, $err) = $node->psql('later', 'BEGIN; CREATE EXTENSION outbox; ROLLBACK; SELECT 1');
is("$ret$out$err", '01', 'CREATE EXTENSION can be rolled back');
sql('CREATE SCHEMA elsewhere; CREATE EXTENSION outbox SCHEMA elsewhere', 'later');
$receiver->clear_log;
sql(q(SELECT elsewhere.outbox_publish('order', 'a', 'e', '{}')), 'later');
$receiver->wait_requests(1, desc => 'an extension created again, elsewhere, is not overlooked');
sql('DROP DATABASE later WITH (FORCE)');
is(sql(q(SELECT count(*) FROM pg_database WHERE datname = 'later')), 0, 'a worker does not stand in the way of DROP DATABASE WITH (FORCE)');

reload($node, 'outbox.endpoint' => '');
$receiver->clear_log;
my $waiting = write_event('outbox_events', 'a', 6);
wait_sql($node, 'postgres', 'SELECT state, pending FROM outbox_status', 'no endpoint|1',
    desc => 'without an endpoint events wait, and the status says why');
reload($node, 'outbox.endpoint' => $receiver->url('/'));
$receiver->wait_requests(1, desc => 'an endpoint set later needs no restart for them');
is_deeply([ $receiver->ids ], [$waiting], '... and nothing is lost');

# ---------------------------------------------------------------------------------------------------------
# Who may not

($ret, $out, $err) = $node->psql('schema_1', 'CREATE SCHEMA t; ALTER EXTENSION outbox SET SCHEMA t');
isnt($ret, 0, 'the extension cannot be moved away under its worker');
like($err, qr/does not support SET SCHEMA/, '... and says so');
is(sql(q(SELECT superuser, trusted, relocatable FROM pg_available_extension_versions WHERE name = 'outbox')),
    't|f|f', 'not relocatable, not trusted');

sql('CREATE ROLE landlord LOGIN');
sql('CREATE DATABASE house OWNER landlord');
($ret, $out, $err) = sql_as('landlord', 'CREATE EXTENSION outbox', 'house');
isnt($ret, 0, 'a database owner cannot start a relay that runs with other rights than his');
like($err, qr/permission denied to create extension/, '... and is told so');
is(sql('SELECT count(*) FROM pg_extension WHERE extname = \'outbox\'', 'house'), 0, '... nothing was created');

subtest 'nobody gets rights by default' => sub {
    sql('CREATE ROLE nobody LOGIN');
    for my $query (
        'SELECT count(*) FROM outbox_events',
        q(INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 'b', 'c', '{}')),
        q(SELECT outbox_publish('a', 'b', 'c', '{}')),
        'SELECT outbox_replay(gen_random_uuid())',
        'SELECT outbox_accept(gen_random_uuid())',
        'SELECT outbox_wake()',
        'SELECT * FROM outbox_relay()',
        'SELECT * FROM outbox_workers()',
        'SELECT * FROM outbox_status',
        'SELECT * FROM outbox_dead_letters',
        'SELECT * FROM processed_events',
        'SHOW outbox.endpoint',
        'SHOW outbox.http_headers')
    {
        ($ret, $out, $err) = sql_as('nobody', $query);
        like($err, qr/permission denied|must be superuser/, $query);
    }
    sql('GRANT pg_monitor TO nobody');
    ($ret, $out, $err) = sql_as('nobody', 'SELECT state FROM outbox_status');
    is("$out$err", 'ok', 'pg_monitor reads the status');
};

done_testing();
