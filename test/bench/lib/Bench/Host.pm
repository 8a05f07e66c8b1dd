# The machine under the bench: a temporary directory, programs run as an unprivileged user (as root
# PostgreSQL would refuse to start), and the promise that nothing of it is left behind.
package Bench::Host;

use strict;
use warnings;

use File::Copy qw(copy);
use File::Path qw(remove_tree);
use File::Temp qw(tempdir);
use IO::Socket::INET;
use POSIX qw(:sys_wait_h);
use Time::HiRes qw(sleep time);

sub new {
    my ($class, %option) = @_;
    my $self = bless { running => {}, owner => $$ }, $class;
    if ($> == 0) {
        my (undef, undef, $uid, $gid) = getpwnam $option{user}
          or die "there is no user $option{user} to run the server programs as (see --user)\n";
        die "--user must be an unprivileged user\n" if $uid == 0;
        @$self{qw(uid gid)} = ($uid, $gid);
    }
    $self->{dir} = tempdir('outbox-bench-XXXXXX', DIR => $option{dir});
    $self->directory($_) for '', 'log';
    return $self;
}

sub path { my ($self, $name) = @_; return $name eq '' ? $self->{dir} : "$self->{dir}/$name" }

# A directory (or, with a source, a file) below the temporary one that the programs may use.
sub directory {
    my ($self, $name) = @_;
    my $path = $self->path($name);
    -d $path or mkdir $path or die "$path: $!\n";
    $self->_give($path, 0700);
    return $path;
}

sub install {
    my ($self, $source, $name) = @_;
    copy($source, $self->path($name)) or die "$source: $!\n";
    $self->_give($self->path($name), 0600);
    return $self->path($name);
}

sub write_file {
    my ($self, $name, $text) = @_;
    open my $file, '>', $self->path($name) or die "$name: $!\n";
    print {$file} $text;
    close $file or die "$name: $!\n";
    $self->_give($self->path($name), 0600);
    return $self->path($name);
}

sub _give {
    my ($self, $path, $mode) = @_;
    chmod $mode, $path or die "$path: $!\n";
    return if !defined $self->{uid};
    chown $self->{uid}, $self->{gid}, $path or die "$path: $!\n";
    return;
}

# Processors that are busy while the bench itself does nothing: others' work, and what a hypervisor
# gave to others.
sub busy_processors {
    my @before = _processor_times();
    sleep 0.25;
    my @after  = _processor_times();
    my ($all, $idle) = map { $after[$_] - $before[$_] } 0, 1;
    return $all > 0 ? ($all - $idle) / $all * $before[2] : 0;
}

# Ticks in all, ticks of these idle or waiting for a disk, number of processors.
sub _processor_times {
    open my $stat, '<', '/proc/stat' or die "/proc/stat: $!\n";
    my @lines = grep { /^cpu/ } readline $stat;
    my (undef, @ticks) = split ' ', $lines[0];
    my $all = 0;
    $all += $_ for @ticks[ 0 .. 7 ];
    return ($all, $ticks[3] + $ticks[4], @lines - 1);
}

sub free_port {
    my $socket = IO::Socket::INET->new(Listen => 1, LocalAddr => '127.0.0.1', ReuseAddr => 1)
      or die "no free port: $!\n";
    return $socket->sockport;
}

# Starts a program in the background; its output can be read from {out}, its complaints go to a log.
sub spawn {
    my ($self, $name, @command) = @_;
    my $log = $self->path("log/$name");
    pipe my $out, my $in or die "pipe: $!\n";
    my $pid = fork // die "fork: $!\n";
    $pid || $self->_become($in, $log, @command);
    close $in;
    my $child = { pid => $pid, name => $name, out => $out, log => $log };
    $self->{running}{$pid} = $child;
    return $child;
}

# In the child: own process group (the bench decides who stops when), own user, then the program.
sub _become {
    my ($self, $in, $log, @command) = @_;
    eval {
        setpgrp;
        chdir $self->{dir};
        open STDIN,  '<',  '/dev/null'        or die "stdin: $!\n";
        open STDERR, '>',  $log               or die "$log: $!\n";
        open STDOUT, '>&', $in                or die "stdout: $!\n";
        if (defined $self->{uid}) {
            $) = "$self->{gid} $self->{gid}";
            POSIX::setgid($self->{gid}) // die "setgid: $!\n";
            POSIX::setuid($self->{uid}) // die "setuid: $!\n";
        }
        $ENV{HOME} = $self->{dir};
        delete $ENV{$_} for grep { /^PG/ && $_ ne 'PG_CONFIG' } keys %ENV;
        exec { $command[0] } @command or die "$command[0]: $!\n";
    };
    print STDERR $@;
    POSIX::_exit(127);
}

# Waits for the end of a program; its output, or death with what it complained about.
sub finish {
    my ($self, $child) = @_;
    my $output = do { local $/; readline $child->{out} } // '';
    waitpid $child->{pid}, 0;
    my $status = $?;
    delete $self->{running}{ $child->{pid} };
    die "$child->{name} failed (" . describe($status) . '): ' . $self->complaint($child) . "\n"
      if $status != 0;
    return $output;
}

sub describe {
    my ($status) = @_;
    return $status & 127 ? 'signal ' . ($status & 127) : 'exit code ' . ($status >> 8);
}

sub complaint {
    my ($self, $child) = @_;
    open my $log, '<', $child->{log} or return 'no log';
    my @lines = grep { /\S/ } readline $log;
    my $first = @lines > 12 ? @lines - 12 : 0;
    return join '', @lines[ $first .. $#lines ];
}

# What the programs not yet ended said last: shown when the run breaks off.
sub last_words {
    my ($self) = @_;
    my @children = sort { $a->{pid} <=> $b->{pid} } values %{ $self->{running} };
    my %words = map { $_->{name} => $self->complaint($_) } @children;
    return join '', map { $words{ $_->{name} } ? "--- $_->{name}\n$words{$_->{name}}" : () } @children;
}

sub command { my ($self, $name, @command) = @_; return $self->finish($self->spawn($name, @command)) }

# Ends a program this bench started: the signal it ends well at, then one it cannot ignore.
sub stop {
    my ($self, $child, $signal, $seconds) = @_;
    return if $self->has_ended($child);
    kill $signal, $child->{pid};
    if (!eval { wait_until("$child->{name} ends", $seconds, sub { $self->has_ended($child) }); 1 }) {
        kill 'KILL', -$child->{pid};
        kill 'KILL', $child->{pid};
        waitpid $child->{pid}, 0;
        delete $self->{running}{ $child->{pid} };
    }
    return;
}

# True when a program has ended by itself.
sub has_ended {
    my ($self, $child) = @_;
    return 1 if !$self->{running}{ $child->{pid} };
    return 0 if waitpid($child->{pid}, WNOHANG) == 0;
    delete $self->{running}{ $child->{pid} };
    return 1;
}

sub wait_until {
    my ($what, $seconds, $condition) = @_;
    my $deadline = time + $seconds;
    until ($condition->()) {
        die "timed out: $what\n" if time > $deadline;
        sleep 0.02;
    }
    return;
}

# Compiles programs side by side; warnings are errors, as in the rest of the repository.
sub compile {
    my ($self, $source_dir, $include_dir, @names) = @_;
    my $compiler = $ENV{CXX} // 'g++';
    my @sources = map { $self->install($_, (split m{/}, $_)[-1]) } glob "$source_dir/*.[ch]pp";
    die "no sources in $source_dir\n" if !@sources;
    my @flags = (qw(-O2 -std=c++20 -Wall -Wextra -Wshadow -Werror -isystem), $include_dir);
    my @children = map {
        $self->spawn("compile-$_", '/usr/bin/env', $compiler, @flags, "$_.cpp", '-o', $_, qw(-lpq -lcurl))
    } @names;
    $self->finish($_) for @children;
    return;
}

sub cleanup {
    my ($self) = @_;
    return if $$ != $self->{owner};
    # The youngest first: clients before the servers they talk to.
    for my $child (sort { $b->{pid} <=> $a->{pid} } values %{ $self->{running} }) {
        $self->stop($child, $child->{name} eq 'postgres' ? 'QUIT' : 'TERM', 5);
    }
    remove_tree($self->{dir}) if $self->{dir};
    return;
}

1;
