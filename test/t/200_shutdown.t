# A fast shutdown ends soon whatever the endpoint does, loses nothing, and repeats only what was not answered.

use strict;
use warnings;

use File::Basename qw(dirname);
use IPC::Run ();
use OutboxTest;
use PostgreSQL::Test::Utils ();
use Test::More;
use Time::HiRes ();

# The contract's seconds for a fast shutdown; pg_ctl's polling and the checkpoint of a loaded machine come on top.
use constant { STOP_SECONDS => 5, SLACK_SECONDS => 3 };

my $receiver = start_receiver();
my $node     = new_node('main', receiver => $receiver, conf => { 'outbox.retention' => -1 });
create_extension($node);

sub now { return Time::HiRes::clock_gettime(Time::HiRes::CLOCK_MONOTONIC()) }

sub stop_fast
{
    my ($what) = @_;
    my $begin = now();
    my $ended = PostgreSQL::Test::Utils::system_log('pg_ctl', '-D', $node->data_dir, '-m', 'fast', '-t', 30, 'stop') == 0;
    stopped_in_time(now() - $begin, $what);
    $node->stop($ended ? 'fast' : 'immediate', fail_ok => 1);    # lets the module know, too
    return;
}

sub stopped_in_time
{
    my ($seconds, $what) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    cmp_ok($seconds, '<', STOP_SECONDS + wait_seconds(SLACK_SECONDS), sprintf 'stopped in %.2f s %s', $seconds, $what);
    diag(sprintf 'stopping %s took %.2f s, more than %d s', $what, $seconds, STOP_SECONDS) if $seconds >= STOP_SECONDS;
    return;
}

# pg_ctl in the background; the server has begun to stop when this returns.
sub begin_stop
{
    my $offset = log_offset($node);
    my $stop   = {
        begin  => now(),
        pg_ctl => IPC::Run::start([ 'pg_ctl', '-D', $node->data_dir, '-m', 'fast', 'stop' ], '>', \my $out, '2>&1'),
    };
    wait_log($node, qr/received fast shutdown request/, $offset, desc => 'the server is stopping');
    return $stop;
}

sub finish_stop
{
    my ($stop) = @_;
    ok($stop->{pg_ctl}->finish, 'stopped');
    my $seconds = now() - $stop->{begin};
    $node->stop('fast', fail_ok => 1);    # lets the module know, too
    return $seconds;
}

# Nothing of an earlier subtest is left.
sub fresh
{
    my (%conf) = @_;
    $receiver->mode('accept');
    $receiver->clear_rules;
    set_conf($node, 'outbox.endpoint' => $receiver->url, %conf);
    defined postmaster_pid($node) ? reload($node) : $node->start;
    wait_drained($node);
    $receiver->wait_idle;
    $receiver->clear_log;
    return;
}

sub hung_ids { return map { $receiver->event_id($_) } $receiver->log({ outcome => 'hung' }) }

# How often each event was sent, as "n x times".
sub sends
{
    my (@ids) = @_;
    my (%sent, %times);
    $sent{ $receiver->event_id($_) }++ for $receiver->log;
    $times{ $sent{$_} // 0 }++ for @ids;
    return join ', ', map { "$times{$_} sent $_ x" } sort { $a <=> $b } keys %times;
}

sub without { my ($all, @some) = @_; my %some = map { $_ => 1 } @some; return grep { !$some{$_} } @$all }

sub sum_of_attempts { return $node->safe_psql('postgres', 'SELECT sum(attempts) FROM outbox_events') }

sub in_flight { return 0 + $node->safe_psql('postgres', 'SELECT in_flight FROM outbox_status') }

subtest 'an endpoint that accepts and never answers does not hold up the shutdown' => sub {
    fresh();
    $receiver->hang;
    my @ids = publish($node, n => 200, aggregates => 200);
    $receiver->wait_hung(64);
    my @hung = hung_ids();
    stop_fast('with 64 requests hanging');
    $receiver->wait_idle;
    $receiver->clear_rules;
    $node->start;
    wait_drained($node);
    is(sends(@hung), scalar(@hung) . ' sent 2 x', 'what hung was sent again, once');
    is(sends(without(\@ids, @hung)), 200 - @hung . ' sent 1 x', 'the rest once');
    is(sum_of_attempts(), 0, 'our own abort counts as no attempt');
    is_deeply([ $receiver->out_of_order ], [], 'in order');
};

subtest 'an unroutable endpoint does not hold up the shutdown' => sub {
    fresh();
    $receiver->mode('blackhole');
    $receiver->close_connections;
    my @ids = publish($node, n => 100, aggregates => 100);
    wait_for('connecting', sub { in_flight() >= 10 });
    stop_fast('while connecting');
    $receiver->mode('accept');
    $node->start;
    wait_drained($node);
    is(sends(@ids), '100 sent 1 x', 'each sent, once');
    is(sum_of_attempts(), 0, 'no attempt counted');
};

subtest 'a name lookup that hangs neither stops the relay nor its shutdown' => sub {
    fresh();
    my $dir     = PostgreSQL::Test::Utils::tempdir();
    my $library = "$dir/hanging_lookup.so";
    my $source  = dirname($INC{'OutboxTest.pm'}) . '/../t/support/hanging_lookup.c';
    PostgreSQL::Test::Utils::system_or_bail('cc', '-shared', '-fPIC', '-o', $library, $source, '-ldl');
    my $log = "$dir/lookups";
    $node->stop;
    {
        local @ENV{qw(LD_PRELOAD HANGING_LOOKUP_HOST HANGING_LOOKUP_LOG)} = ($library, 'hanging.example', $log);
        $node->start;
    }

    reload($node, 'outbox.endpoint' => 'http://hanging.example/', 'outbox.connect_timeout' => '300ms');
    my ($id) = publish($node);
    wait_for('a lookup hangs', sub { -s $log });
    wait_for('the event waits', sub { defined event_row($node, $id)->{last_error} });
    like(event_row($node, $id)->{last_error}, qr/resolv/i, 'its error says what for');
    $receiver->clear_log;
    reload($node, 'outbox.endpoint' => $receiver->url);
    my ($other) = publish($node, id => 'other');
    $receiver->wait_requests(1, { 'ce-id' => $other }, desc => 'others are delivered while lookups hang', timeout => 20);
    wait_drained($node);

    reload($node, 'outbox.endpoint' => 'http://hanging.example/', 'outbox.connect_timeout' => '60s');
    my $lookups = -s $log;
    my @ids = publish($node, n => 20, aggregates => 20);
    wait_for('lookups hang', sub { -s $log > $lookups });
    cmp_ok(in_flight(), '>=', 1, 'in flight');
    stop_fast('in the middle of a name lookup');
    set_conf($node, 'outbox.endpoint' => $receiver->url, 'outbox.connect_timeout' => undef);
    $node->start;
    wait_drained($node);
    is(sends(@ids), '20 sent 1 x', 'each sent, once');
    is(sum_of_attempts(), 0, 'no attempt counted');
};

subtest 'what is answered within the grace is recorded and not sent twice' => sub {
    fresh('outbox.shutdown_timeout' => '2s', 'outbox.retry_base' => '100ms');
    $receiver->hang;
    my @ids = publish($node, n => 20, aggregates => 10);
    $receiver->wait_hung(10);
    my @log  = $receiver->log;
    my $stop = begin_stop();
    $receiver->release(index => [ map { $_->{index} } @log[ 0 .. 3 ] ], status => 200);
    $receiver->release(index => [ map { $_->{index} } @log[ 4 .. 5 ] ], status => 500);
    stopped_in_time(finish_stop($stop), 'with requests answered meanwhile');
    my @delivered = map { $receiver->event_id($_) } @log[ 0 .. 3 ];
    my @failed    = map { $receiver->event_id($_) } @log[ 4, 5 ];
    my @aborted   = map { $receiver->event_id($_) } @log[ 6 .. 9 ];
    my @followers = without(\@ids, @delivered, @failed, @aborted);
    is(sends(@followers), '10 sent 0 x', 'no request was started during the shutdown');
    $receiver->clear_rules;
    $node->start;
    wait_drained($node);
    is(sends(@delivered), '4 sent 1 x', 'delivered during the shutdown: not sent again');
    is(sends(@failed),    '2 sent 2 x', 'failed during the shutdown: sent again');
    is(sends(@aborted),   '4 sent 2 x', 'not answered: sent again');
    is(sends(@followers), '10 sent 1 x', 'the others once');
    is(join(' ', map { event_row($node, $_)->{attempts} } @failed), '1 1', 'a failure during the shutdown counts');
    is(sum_of_attempts(), 2, 'nothing else does');
    is_deeply([ $receiver->out_of_order ], [], 'in order');
};

subtest 'the shutdown does not wait out its grace when all is answered' => sub {
    fresh('outbox.shutdown_timeout' => '1h', 'outbox.request_timeout' => '1h');
    $receiver->hang;
    my @ids = publish($node, n => 10, aggregates => 10);
    $receiver->wait_hung(10);
    my $stop = begin_stop();
    is($receiver->release(status => 204), 10, 'all answered');
    finish_stop($stop);
    $receiver->clear_rules;
    $node->start;
    is(count_delivered($node), $node->safe_psql('postgres', 'SELECT count(*) FROM outbox_events'), 'all recorded');
    wait_workers($node, 1);
    is(sends(@ids), '10 sent 1 x', 'nothing sent twice');
};

subtest 'with shutdown_timeout = 0 nothing in flight is waited for' => sub {
    fresh('outbox.shutdown_timeout' => 0);
    $receiver->hang;
    my @ids = publish($node, n => 10, aggregates => 10);
    $receiver->wait_hung(10);
    stop_fast('without grace');
    $receiver->clear_rules;
    $node->start;
    wait_drained($node);
    is(sends(@ids), '10 sent 2 x', 'sent again');
    is(sum_of_attempts(), 2, 'no attempt counted');
    set_conf($node, 'outbox.shutdown_timeout' => undef, 'outbox.request_timeout' => undef);
};

subtest 'a trigger of the user that never returns does not hold up the shutdown' => sub {
    fresh();
    $node->safe_psql('postgres', q(
        CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(3600); RETURN NEW; END';
        CREATE TRIGGER dawdle BEFORE UPDATE ON outbox_events FOR EACH ROW EXECUTE FUNCTION dawdle()));
    my ($id) = publish($node);
    wait_sql($node, 'postgres', q(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox worker' AND wait_event = 'PgSleep'), 1,
        desc => 'the worker is in the trigger');
    stop_fast('in a trigger');
    set_conf($node, 'outbox.databases' => '');
    $node->start;
    $node->safe_psql('postgres', 'DROP FUNCTION dawdle() CASCADE');
    reload($node, 'outbox.databases' => '*');
    wait_drained($node);
    is(sends($id), '1 sent 2 x', 'its result could not be recorded: sent again');
    is(event_row($node, $id)->{attempts}, 0, 'no attempt counted');
};

subtest 'a server stopped as soon as it started keeps its events' => sub {
    fresh('outbox.shutdown_timeout' => '200ms');
    $receiver->hang;
    my @ids = publish($node, n => 50, aggregates => 50);
    for my $round (1 .. 3)
    {
        stop_fast("in round $round");
        $node->start;
    }
    $receiver->clear_rules;
    $receiver->release;
    wait_drained($node);
    is_deeply([ sort $receiver->ids ], [ sort @ids ], 'all arrived');
    is(sum_of_attempts(), 2, 'no attempt counted');
    unlike(log_since($node, 0), qr/PANIC|TRAP|terminated by signal/, 'no process died');
};

done_testing();
