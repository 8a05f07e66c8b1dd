# Signals that a superuser may send: the relay is back in seconds, and nothing is lost, sent twice or out of order.

use strict;
use warnings;

use OutboxTest;
use Test::More;

my $receiver = start_receiver(seed => 210);
my $node     = new_node('main', receiver => $receiver, conf => { 'outbox.retention' => -1 });
create_extension($node);

use constant BACK_SECONDS => 20;    # "in seconds", on a loaded machine

sub fresh
{
    my (%conf) = @_;
    $receiver->clear_rules;
    reload($node, %conf);
    wait_drained($node);
    $receiver->wait_idle;
    $receiver->clear_log;
    $node->safe_psql('postgres', 'DELETE FROM outbox_events WHERE processed_at IS NOT NULL');
    return;
}

# A backlog that takes some two seconds: the receiver answers slowly, 64 at once.
sub slow_backlog
{
    $receiver->rule(delay_ms => [ 20, 300 ]);
    my @ids = publish($node, n => 800, aggregates => 200);
    $receiver->wait_requests(70);
    return @ids;
}

# Runs a statement in the server again and again until nothing is pending.
sub storm
{
    my ($statement, $desc) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    my $times = $node->safe_psql('postgres', qq(
        CREATE TEMP TABLE storm (times int);
        DO \$\$
        DECLARE
            n int := 0;
        BEGIN
            WHILE EXISTS (SELECT FROM outbox_events WHERE processed_at IS NULL) AND n < 10000 LOOP
                PERFORM $statement;
                PERFORM pg_stat_clear_snapshot(), pg_sleep(0.003);
                n := n + 1;
            END LOOP;
            INSERT INTO storm VALUES (n);
        END \$\$;
        SELECT times FROM storm));
    cmp_ok($times, '>=', 20, "$desc: $times times");
    return;
}

sub all_well
{
    my (@ids) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    wait_drained($node);
    $receiver->wait_idle;
    is_deeply([ sort $receiver->ids ],              [ sort @ids ], 'all arrived');
    is_deeply([ $receiver->duplicates ],             [], 'nothing twice');
    is_deeply([ $receiver->out_of_order ],           [], 'in order');
    is_deeply([ $receiver->overlaps_per_aggregate ], [], 'one at a time per aggregate');
    is(count_delivered($node), scalar @ids, 'all recorded as delivered');
    is(attempts(), 0, 'no attempt counted');
    return;
}

sub attempts { return $node->safe_psql('postgres', 'SELECT sum(attempts) FROM outbox_events') }

sub signal
{
    my ($function, $type) = @_;
    return $node->safe_psql('postgres',
        "SELECT bool_and($function(pid)) FROM pg_stat_activity WHERE backend_type = '$type'");
}

sub in_trouble
{
    return $node->safe_psql('postgres', q(SELECT count(*) FROM outbox_workers() WHERE state <> 'ok'));
}

subtest 'pg_terminate_backend of the worker in the middle of a backlog' => sub {
    fresh();
    my @ids = slow_backlog();
    for my $round (1 .. 2)
    {
        my @old = worker_pids($node, 'postgres');
        is(signal('pg_terminate_backend', 'outbox worker'), 't', 'terminated');
        wait_workers($node, 1, not => \@old, timeout => BACK_SECONDS, desc => 'another worker is there');
        publish($node, id => "after round $round");
    }
    $receiver->wait_requests(scalar @ids + 2);
    all_well(@ids, map { $_->{headers}{'ce-id'}[0] } $receiver->log({ 'ce-partitionkey' => qr/^after/ }));
};

subtest 'pg_terminate_backend of the worker while its requests hang' => sub {
    fresh('outbox.shutdown_timeout' => '300ms');
    $receiver->hang;
    my @ids = publish($node, n => 100, aggregates => 100);
    $receiver->wait_hung(64);
    my @hung = map { $receiver->event_id($_) } $receiver->log;
    my @old = worker_pids($node, 'postgres');
    is(signal('pg_terminate_backend', 'outbox worker'), 't', 'terminated');
    wait_for('its requests are given up', sub { $receiver->count({ outcome => 'peer_closed' }) == @hung });
    $receiver->clear_rules;
    wait_workers($node, 1, not => \@old, timeout => BACK_SECONDS, desc => 'another worker is there');
    wait_drained($node);
    $receiver->release;
    is_deeply([ sort $receiver->ids ], [ sort @ids ], 'all arrived');
    is(scalar(my @twice = $receiver->duplicates), scalar @hung, 'only what hung was sent again');
    is(attempts(), 0, 'no attempt counted');
    fresh('outbox.shutdown_timeout' => undef);
};

subtest 'pg_cancel_backend of the worker, again and again' => sub {
    fresh();
    my @old = worker_pids($node, 'postgres');
    my @ids = slow_backlog();
    storm(q(pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox worker'), 'cancelled');
    all_well(@ids);
    wait_workers($node, 1, timeout => BACK_SECONDS);
    is_deeply([ worker_pids($node, 'postgres') ], \@old, 'the worker is still the same');
    wait_for('and is well', sub { in_trouble() == 0 });
};

subtest 'pg_cancel_backend in the middle of a statement loses no result' => sub {
    fresh();
    $node->safe_psql('postgres', q(
        CREATE TABLE dawdling ();
        INSERT INTO dawdling DEFAULT VALUES;
        CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql SET search_path = public AS $$
        BEGIN
            IF EXISTS (SELECT FROM dawdling) THEN PERFORM pg_sleep(3600); END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER dawdle BEFORE UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION dawdle()));
    my @ids = publish($node, n => 5, aggregates => 5);
    wait_sql($node, 'postgres', q(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox worker' AND wait_event = 'PgSleep'), 1,
        desc => 'the worker is in a trigger');
    $node->safe_psql('postgres', 'DELETE FROM dawdling');
    signal('pg_cancel_backend', 'outbox worker');
    all_well(@ids);
    $node->safe_psql('postgres', 'DROP FUNCTION dawdle() CASCADE; DROP TABLE dawdling');
};

subtest 'pg_terminate_backend of the launcher: its workers are adopted' => sub {
    fresh('outbox.workers' => 3);
    wait_workers($node, 3);
    my @ids     = slow_backlog();
    my @workers = worker_pids($node, 'postgres');
    my $old     = launcher_pid($node);
    is(signal('pg_terminate_backend', 'outbox launcher'), 't', 'terminated');
    wait_for('another launcher is there', sub { my $pid = launcher_pid($node); return $pid && $pid != $old }, timeout => BACK_SECONDS);
    # It has looked around when a database that it did not know got its first worker.
    create_db($node, 'looked_around');
    create_extension($node, 'looked_around');
    wait_workers($node, 3, db => 'looked_around', desc => 'the new launcher starts workers elsewhere');
    is_deeply([ worker_pids($node, 'postgres') ], \@workers, 'the workers are the same, and no others');
    is($node->safe_psql('postgres', q(SELECT string_agg(ordinal || ' ' || status, ', ' ORDER BY ordinal) FROM outbox_workers())),
        '0 running, 1 running, 2 running', 'one of each ordinal');
    all_well(@ids);

    my ($first) = @workers;
    $node->safe_psql('postgres', "SELECT pg_terminate_backend($first)");
    wait_workers($node, 3, db => 'postgres', not => [$first], timeout => BACK_SECONDS, desc => 'an adopted worker that ends is replaced');
    is(scalar(grep { $_ != $first } @workers), scalar(my @same = grep { my $pid = $_; grep { $_ == $pid } @workers } worker_pids($node, 'postgres')),
        'and only that one');
};

subtest 'what happens while there is no launcher is seen by the next one' => sub {
    fresh('outbox.workers' => 3);
    wait_workers($node, 3, db => 'postgres');
    my @ids = slow_backlog();
    my @old = worker_pids($node, 'postgres');
    my $old = launcher_pid($node);
    create_db($node, 'meanwhile');
    is($node->safe_psql('postgres', qq(
        SELECT bool_and(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'outbox launcher' OR pid = $old[0])),
        't', 'launcher and a worker terminated');
    set_conf($node, 'outbox.workers' => 2);
    $node->reload;
    create_extension($node, 'meanwhile');
    wait_for('another launcher is there', sub { my $pid = launcher_pid($node); return $pid && $pid != $old }, timeout => BACK_SECONDS);
    wait_workers($node, 2, db => 'postgres',  not => [ $old[0] ], timeout => BACK_SECONDS, desc => 'the new number of workers');
    wait_workers($node, 2, db => 'meanwhile', timeout => BACK_SECONDS, desc => 'the new database has them, too');
    my ($elsewhere) = publish($node, db => 'meanwhile', id => 'elsewhere');
    wait_drained($node, db => 'meanwhile');
    $receiver->wait_requests(1, { 'ce-id' => $elsewhere });
    wait_drained($node);
    is_deeply([ sort $receiver->ids ], [ sort @ids, $elsewhere ], 'all arrived');
    is_deeply([ $receiver->duplicates ],             [], 'nothing twice');
    is_deeply([ $receiver->out_of_order({ 'ce-partitionkey' => qr/^[0-9]/ }) ], [], 'in order');
};

subtest 'pg_cancel_backend of the launcher does not end the relay' => sub {
    fresh('outbox.workers' => 1);
    wait_workers($node, 1, db => 'postgres');
    my @old = worker_pids($node, 'postgres');
    my @ids = slow_backlog();
    signal('pg_cancel_backend', 'outbox launcher') for 1 .. 3;
    wait_for('a launcher is there', sub { launcher_pid($node) }, timeout => BACK_SECONDS);
    all_well(@ids);
    is_deeply([ worker_pids($node, 'postgres') ], \@old, 'the worker is the same');
    signal('pg_terminate_backend', 'outbox worker');
    wait_workers($node, 1, db => 'postgres', not => \@old, timeout => BACK_SECONDS, desc => 'a worker that ends is replaced');
};

subtest 'a storm of reloads disturbs nothing' => sub {
    fresh();
    wait_workers($node, 1, db => 'postgres');
    my @old = worker_pids($node, 'postgres');
    my @ids = slow_backlog();
    storm('pg_reload_conf()', 'reloaded');
    all_well(@ids);
    is_deeply([ worker_pids($node, 'postgres') ], \@old, 'the worker is the same');
};

subtest 'reloads that change the number of workers under load neither repeat nor reorder' => sub {
    fresh();
    my @ids = slow_backlog();
    my $sql = '';
    for my $n (1 .. 40)
    {
        my %conf = ('outbox.workers' => 1 + $n % 4, 'outbox.max_in_flight' => 16 << $n % 4, 'outbox.batch_size' => 1 + 37 * ($n % 3));
        $sql .= "ALTER SYSTEM SET $_ = $conf{$_};\n" for sort keys %conf;
        $sql .= "SELECT pg_reload_conf(), pg_sleep(0.05);\n";
        $sql .= "SELECT 'pending', count(*) FROM outbox_events WHERE processed_at IS NULL;\n" if $n == 10;
    }
    my ($pending) = $node->safe_psql('postgres', "$sql; ALTER SYSTEM RESET ALL; SELECT pg_reload_conf()") =~ /^pending\|([0-9]+)$/m;
    cmp_ok($pending, '>', 0, 'there was a backlog meanwhile');
    all_well(@ids);
    wait_workers($node, 1, db => 'postgres', desc => 'as many workers as it says');
};

subtest 'a worker that is terminated time and again is back in seconds each time' => sub {
    fresh();
    for my $round (1 .. 4)
    {
        my @old = worker_pids($node, 'postgres');
        signal('pg_terminate_backend', 'outbox worker');
        wait_workers($node, 1, db => 'postgres', not => \@old, timeout => BACK_SECONDS, desc => "round $round") or return;
    }
    my ($id) = publish($node);
    all_well($id);
};

unlike(log_since($node, 0), qr/PANIC|TRAP|terminated by signal|was terminated|crash of another/, 'no process died otherwise');

done_testing();
