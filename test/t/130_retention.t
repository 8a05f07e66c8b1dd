# What is delivered goes away in time, what is not delivered never does.

use strict;
use warnings;

use Test::More;

use OutboxTest;

my $receiver = start_receiver();
my $node     = new_node(
    'main',
    receiver => $receiver,
    fast     => 1,
    conf     => {
        'outbox.retention'       => '-1',
        'outbox.retry_base'      => '2h',
        'outbox.retry_cap'       => '2h',
        'outbox.max_attempts'    => 2,
        'outbox.request_timeout' => '10min',
    });
create_extension($node);
wait_workers($node, 1);

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

my $aggregates = 0;

sub insert
{
    my (@types) = @_;
    my @ids = split /\n/, sql(join ' ', 'BEGIN;', (
        map {
            sprintf q[INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 'a%d', '%s', '{}') RETURNING id;],
              ++$aggregates, $_
        } @types), 'COMMIT');
    return wantarray ? @ids : $ids[0];
}

sub left { return [ sort split /\n/, sql('SELECT event_type FROM outbox_events') ] }

sub wait_polls
{
    my ($n) = @_;
    my $count  = 'SELECT sum(wakeups_poll) FROM outbox_workers()';
    my $before = sql($count);
    return wait_for("$n polls", sub { sql($count) >= $before + $n }, quiet => 1);
}

sub wait_left
{
    my ($expected, $name, %opt) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    my $left;
    return wait_for($name, sub { $left = left(); return "@$left" eq "@$expected" }, got => sub { "@$left" }, %opt);
}

# One row in every state that is not delivered, of an age at which anything delivered would be long gone.
$receiver->rule(with => { 'ce-type' => '^(?:fails|waiting|dead|discarded)$' }, status => 500);
$receiver->hang(with => { 'ce-type' => '^hangs$' });
my ($waiting, $dead, $discarded) = insert(qw(waiting dead discarded));
wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_events WHERE attempts = 1', 3, desc => 'they have failed');
sql(qq[
    UPDATE outbox_events SET retry_after = 'infinity' WHERE id IN ('$dead', '$discarded');
    UPDATE outbox_events SET processed_at = now() WHERE id = '$discarded';
    INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, retry_after)
        SELECT aggregate_type, aggregate_id, 'parked', '{}', '-infinity' FROM outbox_events WHERE id = '$waiting';
]);
insert('hangs');
$receiver->wait_hung(1);
my @undelivered = qw(dead hangs parked waiting);

# ---------------------------------------------------------------------------------------------------------

subtest '-1: delivered rows stay for ever' => sub {
    insert('old', 'new');
    wait_sql($node, 'postgres', 'SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL', 3, desc => 'delivered');
    sql(q(UPDATE outbox_events SET processed_at = '1999-01-01' WHERE event_type = 'old'));
    wait_polls(10);
    is_deeply(left(), [ sort @undelivered, qw(discarded new old) ], 'all are there');
};

subtest 'rows that were delivered before the setting changed go, too, and only those of that age' => sub {
    sql(q[
        UPDATE outbox_events SET created_at = '1999-01-01';
        UPDATE outbox_events SET processed_at = now() - interval '61 min' WHERE event_type = 'old';
        UPDATE outbox_events SET processed_at = now() - interval '30 min' WHERE event_type = 'new';
    ]);
    my ($future, $never) = insert('future', 'never');
    wait_sql($node, 'postgres', "SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL AND id IN ('$future', '$never')", 2, desc => 'delivered');
    sql("UPDATE outbox_events SET processed_at = now() + interval '1 day' WHERE id = '$future'; UPDATE outbox_events SET processed_at = 'infinity' WHERE id = '$never'");
    reload($node, 'outbox.retention' => '1h');
    wait_left([ sort @undelivered, qw(discarded future never new) ], 'what is older than an hour is gone');
    wait_polls(5);
    is_deeply(left(), [ sort @undelivered, qw(discarded future never new) ], 'nothing else is');
    sql(q(DELETE FROM outbox_events WHERE event_type IN ('future', 'never')));
};

subtest '1s: everything delivered or discarded goes, nothing that is not' => sub {
    reload($node, 'outbox.retention' => '1s');
    wait_left(\@undelivered, 'delivered and discarded rows are gone, also the ones from before');
    my @ids = insert(('later') x 20);
    $receiver->wait_requests(1, { 'ce-id' => $_ }, quiet => 1) for @ids;
    wait_left(\@undelivered, 'later ones go as they come');
    is_deeply([ $receiver->duplicates({ 'ce-type' => '^later$' }) ], [], '... after one delivery');
    is(sql("SELECT outbox_replay('$ids[0]')"), 'f', 'what is gone cannot be replayed');
    my $before = sql('SELECT string_agg(e::text, \' \' ORDER BY seq) FROM outbox_events e');
    wait_polls(10);
    is(sql('SELECT string_agg(e::text, \' \' ORDER BY seq) FROM outbox_events e'), $before, 'what waits, is dead or in flight is left alone');
};

subtest 'many rows go, also those spread over a large table' => sub {
    reload($node, 'outbox.retention' => '-1');
    sql(q[
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, processed_at)
        SELECT 'order', i::text, 'many', jsonb_build_object('text', repeat('x', 500)), CASE WHEN i % 3 = 0 THEN now() ELSE now() - interval '2 days' END
        FROM generate_series(1, 20000) i]);
    reload($node, 'outbox.retention' => '1d');
    wait_sql($node, 'postgres', q(SELECT count(*) FROM outbox_events WHERE event_type = 'many'), 20_000 - 13_334, desc => 'two thirds are old');
    is(sql(q(SELECT count(*) FROM outbox_events WHERE event_type = 'many' AND processed_at < now() - interval '1 day')), 0, '... none of them is left');
    is($receiver->count({ 'ce-type' => '^many$' }), 0, 'none was sent');
    sql(q(DELETE FROM outbox_events WHERE event_type = 'many'));
};

subtest 'a row that cannot be deleted does not keep the others' => sub {
    reload($node, 'outbox.retention' => '-1');
    sql('CREATE TABLE audit (event uuid NOT NULL REFERENCES outbox_events)');
    my ($kept, @others) = insert('kept', ('others') x 5);
    wait_sql($node, 'postgres', q(SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL), 6, desc => 'delivered');
    sql("INSERT INTO audit VALUES ('$kept')");
    my $offset = log_offset($node);
    reload($node, 'outbox.retention' => '1s');
    wait_left([ sort @undelivered, 'kept' ], 'the others are deleted');
    like(log_since($node, $offset), qr/audit/, 'the log says what keeps the one');
    my $next = insert('next');
    $receiver->wait_requests(1, { 'ce-id' => $next }, desc => 'delivery goes on');
    sql('DROP TABLE audit');
    wait_left(\@undelivered, 'when nothing keeps it any more, it goes');
};

# ---------------------------------------------------------------------------------------------------------

subtest '0: gone with the delivery, and only with it' => sub {
    reload($node, 'outbox.retention' => '-1');
    insert('before');
    wait_sql($node, 'postgres', q(SELECT processed_at IS NOT NULL FROM outbox_events WHERE event_type = 'before'), 't', desc => 'one from before');
    reload($node, 'outbox.retention' => '0');
    $receiver->clear_log;
    my @ids = insert(('now') x 30, 'fails');
    my $failing = pop @ids;
    $receiver->wait_requests(31, sub { $_->{headers}{'ce-type'}[0] =~ /now|fails/ }, answered => 1, desc => 'all are sent');
    wait_left([ sort @undelivered, 'fails' ], 'what is delivered is gone at once, also what was delivered before');
    is_deeply([ $receiver->duplicates ], [], 'nothing was sent twice');
    is(event_row($node, $failing)->{attempts}, 1, 'what failed is there');
    sql("UPDATE outbox_events SET retry_after = now() WHERE id = '$failing'");
    wait_sql($node, 'postgres', "SELECT retry_after FROM outbox_events WHERE id = '$failing'", 'infinity', desc => 'it dies');
    wait_polls(5);
    is_deeply(left(), [ sort @undelivered, 'fails' ], 'a dead one stays');
    $receiver->clear_rules;
    is(sql("SELECT outbox_replay('$failing')"), 't', 'its replay');
    wait_left(\@undelivered, '... is gone with its delivery');

    is($receiver->release, 1, 'what hung all the time is answered');
    wait_left([qw(dead parked waiting)], '... and gone');
    sql("UPDATE outbox_events SET retry_after = now() WHERE id = '$waiting'");
    wait_left(['dead'], 'what waited, and what was parked behind it, is delivered and gone');
};

subtest '0: a row that cannot be deleted is not sent for ever' => sub {
    sql('CREATE TABLE audit (event uuid NOT NULL REFERENCES outbox_events)');
    sql(q[
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.audit VALUES (NEW.id); RETURN NEW; END $$;
        CREATE TRIGGER audit AFTER INSERT ON outbox_events FOR EACH ROW WHEN (NEW.event_type = 'kept') EXECUTE FUNCTION audit();
    ]);
    my $offset = log_offset($node);
    my ($kept, @others) = insert('kept', ('other') x 5);
    wait_left([qw(dead kept)], 'the others are delivered and gone');
    wait_sql($node, 'postgres', "SELECT processed_at IS NOT NULL FROM outbox_events WHERE id = '$kept'", 't', desc => 'the one that is referred to is delivered and stays');
    wait_log($node, qr/outbox: .*audit/, $offset, desc => '... and the log says why');
    wait_polls(5);
    is_deeply([ $receiver->duplicates({ 'ce-type' => qr/^(?:kept|other)$/ }) ], [], 'nothing was sent twice because of it');
    wait_sql($node, 'postgres', 'SELECT unrecorded FROM outbox_workers()', 0, desc => 'nothing is left to be recorded');
    sql('DROP TRIGGER audit ON outbox_events; DROP TABLE audit');
    wait_left(['dead'], 'when nothing refers to it any more, it goes');
};

is(scalar(worker_pids($node)), 1, 'the worker is still there');
unlike(log_since($node, 0), qr/PANIC|FATAL|was terminated/, 'and nothing crashed on the way');

done_testing();
