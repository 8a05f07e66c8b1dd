# Which databases get a relay, and when.

use strict;
use warnings;

use OutboxTest;
use Test::More;
use Time::HiRes ();

my $receiver = start_receiver();
# debug1: the postmaster names each worker process that it starts. autovacuum off: nobody but the relay connects.
my $node = new_node('main', receiver => $receiver,
    conf => { 'outbox.retention' => -1, log_min_messages => 'debug1', autovacuum => 'off' });

my $odd = 'Odd "Db" ü';
my %schema = (one => undef, two => 'Other Schema', $odd => undef);

sub now { return Time::HiRes::clock_gettime(Time::HiRes::CLOCK_MONOTONIC()) }

# ce-source as it is on the wire: the name is percent-encoded as part of a URN, and CloudEvents encodes the percent
# signs of a header value once more.
sub source
{
    my ($db) = @_;
    my $name = $db =~ s/([^A-Za-z0-9._-])/sprintf '%%25%02X', ord $1/ger;
    return 'urn:outbox:' . $node->safe_psql('postgres', 'SELECT system_identifier FROM pg_control_system()') . ":$name";
}

sub oid { my ($db) = @_; return $node->safe_psql($db, 'SELECT oid FROM pg_database WHERE datname = current_database()') }

sub state { my ($db) = @_; return $node->safe_psql($db, 'SELECT state FROM ' . table($node, 'outbox_status', db => $db)) }

# Workers are found by database whatever its name is.
sub pids { my ($db) = @_; my $oid = oid($db); return split /\n/, $node->safe_psql('postgres', "SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox worker' AND datid = $oid") }

sub wait_pids
{
    my ($db, $n, $desc) = @_;
    my @pids;
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    return wait_for($desc, sub { @pids = pids($db); return @pids == $n }, got => sub { "@pids" });
}

# An event of this database arrives.
sub delivers
{
    my ($db, $desc) = @_;
    my ($id) = publish($node, db => $db);
    local $Test::Builder::Level = $Test::Builder::Level + 1;
    $receiver->wait_requests(1, { 'ce-id' => $id }, desc => $desc // "$db delivers");
    return $id;
}

subtest 'CREATE EXTENSION starts a worker at its commit, without a restart' => sub {
    for my $db (sort keys %schema)
    {
        create_db($node, $db);
        create_extension($node, $db, schema => $schema{$db});
        wait_pids($db, 1, 'a worker');
        delivers($db, 'an event arrives');
    }
};

subtest 'databases do not mix up their events' => sub {
    $receiver->clear_log;
    $receiver->rule(delay_ms => [ 1, 10 ]);
    my %published;
    for my $round (1 .. 3)
    {
        for my $db (sort keys %schema) { push @{ $published{$db} }, publish($node, db => $db, n => 100, aggregates => 10) }
    }
    for my $db (sort keys %schema)
    {
        wait_drained($node, db => $db);
        my $filter = { 'ce-source' => source($db) };
        is_deeply([ sort $receiver->ids($filter) ],    [ sort @{ $published{$db} } ], 'its own events arrived, and only those');
        is_deeply([ $receiver->duplicates($filter) ],   [], 'nothing twice');
        is_deeply([ $receiver->out_of_order($filter) ], [], 'in order');
    }
    is($receiver->count, 900, 'nothing under another name');
    $receiver->clear_rules;
};

subtest 'a worker is there for every database that has the extension, for no other' => sub {
    is_deeply([ map { scalar pids($_) } sort keys %schema ], [ 1, 1, 1 ], 'one each');
    is(scalar worker_pids($node), 3, 'and nowhere else');
    create_db($node, 'without');
    reload($node);    # the launcher looks around
    my $oid = oid('without');
    wait_log($node, qr/starting background worker process "outbox worker 0 of database $oid"/, 0, desc => 'a new database is looked into');
    wait_pids('without', 0, 'and left again');
    is(scalar worker_pids($node), 3, 'no worker more');
};

subtest 'a rolled back CREATE EXTENSION starts no worker, and a later one does' => sub {
    create_db($node, 'late');
    my $session = $node->background_psql('late');
    $session->query_safe('BEGIN; CREATE EXTENSION outbox');
    $session->query_safe('ROLLBACK');
    wait_pids('late', 0, 'no worker');
    $session->query_safe('BEGIN; SAVEPOINT s; CREATE EXTENSION outbox; ROLLBACK TO s; CREATE TABLE t (); COMMIT');
    wait_pids('late', 0, 'none for a rolled back savepoint');
    $session->query_safe('BEGIN; CREATE EXTENSION outbox');
    my $id = $session->query_safe(q(SELECT outbox_publish('order', '1', 'order.created', '{}')));
    is(scalar pids('late'), 0, 'none before the commit');
    $session->query_safe('COMMIT');
    wait_pids('late', 1, 'one after it');
    $receiver->wait_requests(1, { 'ce-id' => $id }, desc => 'the event of the same transaction arrives');
    $session->quit;
};

subtest 'DROP EXTENSION ends the worker, CREATE EXTENSION starts it again' => sub {
    for my $round (1 .. 2)
    {
        $node->safe_psql('late', 'DROP EXTENSION outbox');
        wait_pids('late', 0, 'no worker');
        create_extension($node, 'late');
        wait_pids('late', 1, 'a worker again');
        delivers('late');
    }
    $node->safe_psql('late', 'BEGIN; DROP EXTENSION outbox; ROLLBACK');
    delivers('late', 'a rolled back DROP EXTENSION leaves the relay alone');

    $node->safe_psql('late', 'BEGIN; DROP EXTENSION outbox; CREATE SCHEMA moved; CREATE EXTENSION outbox SCHEMA moved; COMMIT');
    $node->safe_psql('late', 'DROP EXTENSION outbox');
    wait_pids('late', 0, 'no worker');
    create_extension($node, 'late', schema => 'moved');
    delivers('late', 'in another schema, too');
};

subtest 'DROP EXTENSION and CREATE EXTENSION in one transaction' => sub {
    $node->safe_psql('late', 'BEGIN; DROP EXTENSION outbox; CREATE EXTENSION outbox SCHEMA moved; COMMIT');
    delivers('late', 'the new table is served');
    wait_pids('late', 1, 'by one worker');
};

subtest 'DROP SCHEMA CASCADE takes the relay with it' => sub {
    $node->safe_psql('late', 'DROP SCHEMA moved CASCADE');
    wait_pids('late', 0, 'no worker');
    create_extension($node, 'late');
    delivers('late', 'and it comes back in another schema');
};

subtest 'DROP EXTENSION does not wait for requests that hang' => sub {
    my $rule = $receiver->hang(with => { 'ce-source' => ':late$' });
    publish($node, db => 'late', n => 10, aggregates => 10);
    $receiver->wait_hung(10);
    $node->safe_psql('late', q(SET statement_timeout = '10s'; DROP EXTENSION outbox));
    wait_pids('late', 0, 'the worker is gone');
    $receiver->wait_idle;
    $receiver->remove_rule($rule);
};

subtest 'DROP DATABASE of another database returns while requests hang' => sub {
    my $rule = $receiver->hang;
    publish($node, db => 'one', n => 10, aggregates => 10);
    $receiver->wait_hung(10);
    my $begin = now();
    $node->safe_psql('postgres', q(SET statement_timeout = '20s'; DROP DATABASE late));
    my $seconds = now() - $begin;
    cmp_ok($seconds, '<', wait_seconds(5), sprintf 'dropped in %.2f s', $seconds);
    is($receiver->hung, 10, 'the requests still hang');
    $receiver->remove_rule($rule);
    $receiver->release;
    wait_drained($node, db => 'one');
};

subtest q(outbox.databases = '' stops delivery, '*' resumes it) => sub {
    reload($node, 'outbox.databases' => '');
    wait_workers($node, 0, desc => 'all workers leave');
    my ($id) = publish($node, db => 'one');
    is(state('one'), 'stopped by outbox.databases', 'the status says why events wait');
    ok(launcher_pid($node), 'the launcher is there');
    create_db($node, 'meanwhile');
    create_extension($node, 'meanwhile');
    reload($node, 'outbox.databases' => '*');
    $receiver->wait_requests(1, { 'ce-id' => $id }, desc => 'what waited arrives');
    delivers($_) for sort keys %schema;
    delivers('meanwhile', 'so does what a database that came meanwhile writes');
    is(state('one'), 'ok', 'the status is ok again');
};

subtest 'outbox.databases as a list' => sub {
    my $quoted = $odd =~ s/"/""/gr;
    reload($node, 'outbox.databases' => qq(TWO , "$quoted"));
    wait_workers($node, 2, desc => 'as many workers as names');
    is_deeply([ map { scalar pids($_) } 'one', 'two', $odd ], [ 0, 1, 1 ], 'in the databases that it names, unquoted ones in lower case');
    my ($waits) = publish($node, db => 'one');
    delivers('two');
    delivers($odd);
    is(state('one'), 'database not in outbox.databases', 'the status says why events wait');
    reload($node, 'outbox.databases' => 'one,two,without,nowhere');
    $receiver->wait_requests(1, { 'ce-id' => $waits }, desc => 'another list: what waited arrives');
    wait_workers($node, 2, desc => 'a name without the extension or without a database keeps no worker');
    is_deeply([ map { scalar pids($_) } 'one', 'two', $odd ], [ 1, 1, 0 ], 'where the list says');
    $node->safe_psql('postgres', q(ALTER SYSTEM SET outbox.databases = one, meanwhile));
    reload($node);
    wait_pids('two', 0, 'a list by ALTER SYSTEM');
    delivers('meanwhile');
    $node->safe_psql('postgres', 'ALTER SYSTEM RESET outbox.databases');
    reload($node, 'outbox.databases' => undef);
    delivers($_) for sort keys %schema;
};

subtest 'template databases are not connected to' => sub {
    for my $n (1 .. 5)
    {
        $node->safe_psql('postgres', "CREATE DATABASE copy_$n");
        $node->safe_psql('postgres', 'SELECT pg_reload_conf()');
    }
    wait_log($node, qr/outbox worker 0 of database @{[ oid('copy_5') ]}/, 0, desc => 'the launcher has seen the last copy');
    my $templates = $node->safe_psql('postgres', q(SELECT string_agg(oid::text, '|') FROM pg_database WHERE datistemplate));
    unlike(log_since($node, 0), qr/outbox worker \d+ of database (?:$templates)\b/, 'no worker was ever started in one');
    wait_for('the copies are left again', sub { worker_pids($node) == 4 });
    $node->safe_psql('postgres', "DROP DATABASE copy_$_") for 1 .. 5;
};

$node->stop;

subtest 'too few worker slots: one warning, and only some databases wait' => sub {
    my $few = new_node('few', receiver => $receiver, start => 0,
        conf => { max_worker_processes => 3, max_logical_replication_workers => 0, 'outbox.databases' => 'a,b,c' });
    $few->start;
    for my $db (qw(a b c))
    {
        create_db($few, $db);
        create_extension($few, $db);
    }
    my (@with, @without);
    wait_for('two have a worker', sub {
        my %state = map { $_ => $few->safe_psql($_, q(SELECT CASE WHEN workers > 0 THEN 'worker' ELSE state END FROM outbox_status)) } qw(a b c);
        @with    = grep { $state{$_} eq 'worker' } sort keys %state;
        @without = grep { $state{$_} eq 'no free worker slot' } sort keys %state;
        return @with == 2 && @without == 1;
    }, got => sub { "with: @with, without: @without" });
    my %id = map { $_ => (publish($few, db => $_))[0] } qw(a b c);
    $receiver->wait_requests(1, { 'ce-id' => $id{$_} }, desc => 'with a slot: delivers') for @with;
    is($few->safe_psql($without[0], 'SELECT state || pending FROM outbox_status'), 'no free worker slot1', 'without: the status says why events wait');
    my $log = log_since($few, 0);
    is(scalar(my @warnings = $log =~ /WARNING:.*no free worker slot/g), 1, 'one warning');
    like($log, qr/HINT:.*max_worker_processes/, 'with a hint');
    $few->safe_psql($with[0], 'DROP EXTENSION outbox');
    $receiver->wait_requests(1, { 'ce-id' => $id{ $without[0] } }, desc => 'as soon as there is a slot, the event that waited arrives');
    wait_for('the status is ok', sub { $few->safe_psql($without[0], 'SELECT state FROM outbox_status') eq 'ok' });
    is(scalar(@warnings = log_since($few, 0) =~ /WARNING:.*no free worker slot/g), 1, 'still one warning');
};

done_testing();
