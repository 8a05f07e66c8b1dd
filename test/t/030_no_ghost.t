# What a crash can take back is never sent: with synchronous_commit = off the relay flushes the commit first, and
# flushes nothing where there is nothing to flush.

use strict;
use warnings;

use Test::More;

use OutboxTest;

use constant { ROUNDS => 16, EVENTS => 6, CONTROLS => 3 };

# Nobody but the relay should write out WAL: the writer process is told to wait for 10 s and 1 GB, and pages are kept
# from crossing into new ones by full images.
my $receiver = start_receiver();
my $node     = new_node(
    'main',
    receiver => $receiver,
    conf     => {
        'wal_writer_delay'       => '10s',
        'wal_writer_flush_after' => '1GB',
        'full_page_writes'       => 'off',
        'autovacuum'             => 'off',
        'bgwriter_lru_maxpages'  => 0,
        'commit_delay'           => 0,
        'outbox.poll_interval'   => '1h',
    });
create_extension($node);
wait_workers($node, 1);
$node->safe_psql('postgres',
    'CREATE TABLE business (event uuid PRIMARY KEY, round int); CREATE TABLE control (round int)');

sub sql { my ($query) = @_; return $node->safe_psql('postgres', $query) }

# Business data and event in one transaction; the id.
sub transaction
{
    my ($round, $aggregate) = @_;
    return 'WITH e AS (INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) '
      . "VALUES ('order', '$aggregate', 'e', '{}') RETURNING id) INSERT INTO business SELECT id, $round FROM e RETURNING event;";
}

sub counters { return split /\|/, sql('SELECT sum(turns), sum(wal_flushes), sum(delivered) FROM outbox_workers()') }

# ---------------------------------------------------------------------------------------------------------
# Counted: who flushes when

my ($turns, $flushes, $delivered) = counters();
sql(join ' ', 'SET synchronous_commit = off;', map { transaction(0, $_) } 1 .. 50);
$receiver->wait_requests(50, desc => 'events of asynchronous commits arrive');
wait_drained($node);
my ($turns_2, $flushes_2) = counters();
cmp_ok($flushes_2, '>', $flushes, 'an asynchronous commit is not sent before it is flushed');

sql(join ' ', map { transaction(0, $_) } 1 .. 500);
$receiver->wait_requests(550, desc => '500 synchronous commits arrive');
wait_drained($node);
my ($turns_3, $flushes_3, $delivered_3) = counters();
note sprintf 'asynchronous: %d flushes in %d turns; synchronous: %d in %d', $flushes_2 - $flushes, $turns_2 - $turns,
  $flushes_3 - $flushes_2, $turns_3 - $turns_2;
is($delivered_3 - $delivered, 550, 'all were delivered');
cmp_ok($turns_3 - $turns_2, '>=', 20, 'they took many turns');
cmp_ok(5 * ($flushes_3 - $flushes_2), '<=', $turns_3 - $turns_2,
    'synchronous writers are not made to pay twice: hardly a turn flushes');
$receiver->clear_log;

# ---------------------------------------------------------------------------------------------------------
# Proved: crashes

# The session writes, the server is stopped dead while some of it is on its way; the ids of what was written.
sub crash
{
    my ($round, $statements, $arrived) = @_;
    my $session = $node->background_psql('postgres');
    # Makes the relay familiar with the present: from here on, a flush is what an event makes it do.
    $session->query_safe(transaction($round, 'warm-up')) if $arrived;
    $arrived->(1) if $arrived;
    $session->query_safe('SET synchronous_commit = off');
    my ($first, @others) = @$statements;
    my @written = $session->query_safe($first);
    $arrived->(2) if $arrived;
    push @written, split /\n/, $session->query_safe(join ' ', @others);
    $session->query_safe("INSERT INTO control VALUES ($round)");
    $node->stop('immediate');
    eval { $session->quit };
    return @written;
}

my %written;
for my $round (1 .. ROUNDS)
{
    my $before = $receiver->requests;
    my @statements = map { transaction($round, "r$round-$_") } 1 .. EVENTS;
    # One in a subtransaction, which has an id of its own.
    $statements[1] = "BEGIN; SAVEPOINT s; $statements[1] RELEASE s; COMMIT;";
    my @ids = crash(
        $round,
        \@statements,
        sub {
            my ($what) = @_;
            my $first = $what == 1 ? qr/warm-up/ : qr/r$round-1$/;
            my $name  = "round $round: " . ($what == 1 ? 'the relay is at work' : 'the first event arrived');
            $receiver->wait_requests(1, sub { $_->{index} >= $before && $receiver->aggregate($_) =~ $first }, desc => $name,
                quiet => 1);
        });
    $written{$_} = $round for map { /([0-9a-f]{8}-[0-9a-f-]{27})/ ? $1 : () } @ids;
    $node->start;
}
my @arrived = $receiver->ids;
my %exists = map { $_ => 1 } split /\n/, sql('SELECT e.id FROM outbox_events e JOIN business b ON b.event = e.id WHERE round > 0');
is_deeply([ grep { !$exists{$_} } @arrived ], [], 'no ghost: whatever arrived exists after the crash, and its business data');
my $arrived_async = grep { $written{$_} } @arrived;
cmp_ok($arrived_async, '>=', ROUNDS, "... of $arrived_async asynchronous events in " . ROUNDS . ' crashes');
is(scalar keys %written, ROUNDS * EVENTS, 'the test knows what it wrote');

my $lost_controls = ROUNDS - sql('SELECT count(*) FROM control');
note "rows written without an event, lost: $lost_controls of " . ROUNDS
  . '; events lost unsent: ' . (grep { !$exists{$_} } keys %written);
cmp_ok($lost_controls, '>=', ROUNDS / 4, 'the crashes did lose commits that nobody flushed: the test could have failed');
wait_drained($node);
my %recovered = map { $_ => 1 } $receiver->ids;
is_deeply([ grep { !$recovered{$_} } keys %exists ], [], 'no loss: whatever exists arrived');

# The same without an endpoint, so without a relay that flushes: events are lost. That is the accident.
reload($node, 'outbox.endpoint' => '');
my $there = 0;
my @unsent;
for my $round (1 .. CONTROLS)
{
    push @unsent, crash(100 + $round, [ map { transaction(100 + $round, "c$round-$_") } 1 .. EVENTS ]);
    $node->start;
}
my $survived = sql('SELECT count(*) FROM business WHERE round > 100');
cmp_ok($survived, '<', @unsent, 'without the flush before sending, a crash takes events back');
note "without a relay: $survived of " . @unsent . ' events survived';

done_testing();
