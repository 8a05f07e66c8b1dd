
=head1 NAME

OutboxTest::Wait - wait for a condition, with a deadline

=head1 SYNOPSIS

  use OutboxTest::Wait;

  wait_for('the queue is empty', sub { count_pending($node) == 0 });
  wait_for('slow thing', sub { ... }, timeout => 120, got => sub { "only $n so far" });

=head1 DESCRIPTION

=over

=item wait_for($description, $condition, timeout => 60, interval => 0.03, got => sub {...}, quiet => 0)

Calls the condition until it returns something true and returns that. It is a test: it passes with the
description and the time it took, or fails at the deadline with what B<got> says, the last exception of the
condition (an exception counts as false) and all diagnostics that are registered: the end of the server logs
and the counts of the receivers. With B<quiet>, only the failure is reported.

Timeouts are meant for a quiet machine and scale with the environment variable PG_TEST_TIMEOUT_DEFAULT, in
which 180 means a factor of 1. Once a wait has failed in a test file, the following ones have at most 10 s.

This is the only place in the tests that sleeps.

=item wait_seconds($seconds)

That timeout, scaled.

=item add_diagnostics(sub { "text" })

Something to print when a wait fails.

=back

=cut

package OutboxTest::Wait;

use strict;
use warnings;

use Exporter 'import';
use Test::More ();
use Time::HiRes ();

our @EXPORT = qw(wait_for wait_seconds add_diagnostics);

my @diagnostics;
my $failed = 0;

sub add_diagnostics { push @diagnostics, @_; return }

sub wait_seconds
{
    my ($seconds) = @_;
    my $default = $ENV{PG_TEST_TIMEOUT_DEFAULT};
    return $seconds if !defined $default || $default !~ /^[0-9]+$/ || $default == 0;
    return $seconds * $default / 180;
}

sub wait_for
{
    my ($description, $condition, %opt) = @_;
    my $seconds = $opt{timeout} // 60;
    $seconds = 10 if $failed && $seconds > 10;
    my $begin    = Time::HiRes::clock_gettime(Time::HiRes::CLOCK_MONOTONIC());
    my $deadline = $begin + wait_seconds($seconds);
    my $builder  = Test::More->builder;
    my $error    = '';

    while (1)
    {
        # One more look after the deadline: the time may have passed while the machine was busy elsewhere.
        my $now    = Time::HiRes::clock_gettime(Time::HiRes::CLOCK_MONOTONIC());
        my $result = eval { local $@; $condition->() };
        $error = $@;
        if ($result)
        {
            $builder->ok(1, sprintf '%s (%.2f s)', $description, $now - $begin) unless $opt{quiet};
            return $result;
        }
        last if $now > $deadline;
        Time::HiRes::sleep($opt{interval} // 0.03);
    }

    $failed = 1;
    $builder->ok(0, $description);
    $builder->diag(sprintf 'not so within %.1f s', wait_seconds($seconds));
    $builder->diag('got: ' . (eval { $opt{got}->() } // "error: $@")) if $opt{got};
    $builder->diag("the condition died: $error") if $error;
    for my $more (@diagnostics)
    {
        my $text = eval { $more->() } // "no diagnostics: $@";
        $builder->diag($text) if length $text;
    }
    return;
}

1;
