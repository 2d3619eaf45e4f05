# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_foliomem_global_optspecs
    string join \n verbose h/help V/version
end

function __fish_foliomem_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_foliomem_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_foliomem_using_subcommand
    set -l cmd (__fish_foliomem_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c foliomem -n "__fish_foliomem_needs_command" -l verbose -d 'With --version: also print the commit and how foliomem was built'
complete -c foliomem -n "__fish_foliomem_needs_command" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_needs_command" -s V -l version -d 'Print version'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "run" -d 'Run a program inside a memory limit'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "record" -d 'Run a program as `run` does, and record its memory use for `lab replay`'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "advise" -d 'Predict how much slower a program would be within other limits: records one run, or takes a trace that `record` has written'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "ps" -d 'List the runs of this user, of all users for root'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "top" -d 'Show the runs and their processes, live, and change limits'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "ctl" -d 'Look at a run, and change it, while it goes on'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "doctor" -d 'Check what this machine allows, and print how to mend what is missing'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "setup" -d 'Let ordinary users, containers and services use foliomem; as root'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "bench" -d 'Measure foliomem: its swap, its parts, real programs. Starts foliomem-bench'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "lab" -d 'Try policies on a simulated machine of any size. Starts foliomem-lab'
complete -c foliomem -n "__fish_foliomem_needs_command" -f -a "jupyter" -d 'Add kernels to Jupyter that run inside a limit. Starts python3 -m foliomem'
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l limit -d 'Memory limit for the program and its children together: 512M, 2G, 25% (of RAM, or of the container\'s memory), at least 16M; or need/2: half of their peak need so far, as if uncompressed, and at least 64M; or container: what the cgroups around the run leave for it, followed as that changes. [default of `run`: container, if there is such a cgroup; of `record`: need/2]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l sizes -d 'Folio sizes beside 4K, from 8K to 2M: 16K,64K,2M. "none" for 4K alone. A size may have a value, as in the kernel: 64K=madvise, 2M=inherit; "enabled=" (always, madvise, never) sets the value that sizes inherit. [default: 16K,32K,64K,256K]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l codec -d 'Codec of the compressed memory: lz4, zstd or zstd:LEVEL (1 to 19), or one of these with +dict, which compresses small pieces with a dictionary of the program\'s own content. [default: lz4]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l recompress -d 'While CPUs are idle, compress memory that has not been touched for some seconds again: zstd or zstd:LEVEL, or "off". [default: zstd:3 with --idle, else off]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l granule -d 'Size of the largest piece that is compressed as one, 4K to 2M. [default: 64K]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l swap -d 'Encrypted swap for memory that does not fit into the limit even compressed: a file that does not exist yet and vanishes with the run, or a block device that nothing else uses, whose content is lost. [default size of a file: 8 times the limit, but at most half of the free space]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l idle -d 'Compress all memory of a process that has used no CPU for this long: 30s, 5m; and what a process that works has not used for about twice as long. The memory comes back as it is used. Without --limit, only such memory is compressed, and the limit is the memory of the machine or the container. [default: not]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l turns -d 'If the run thrashes, let as many of its processes run as fit, while the others wait, compressed, for their turn: on or off. While a run is recorded, all run all the time. [default: on]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l stats -d 'Write counters as JSON to FILE at exit; "-" for stderr.' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l metrics -d 'Publish the figures as OpenMetrics text while the run goes on: in a file that is rewritten every 5 seconds, over a Unix socket (a path that ends with .sock), or at a port of this machine (127.0.0.1:9400).' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l report -d 'Write a page about the run to FILE at exit: its memory over time, its faults, sizes and processes, and advice. It is HTML and needs no network.' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l config -d 'Read settings from this TOML file. [default: $FOLIOMEM_CONFIG, then foliomem/config.toml in $XDG_CONFIG_HOME or ~/.config]' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l hard -d 'Stop the program (exit code 137) if its data does not compress into the limit, instead of exceeding the limit.'
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l quiet -d 'Print no summary at exit.'
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -l print-config -d 'Print the settings and their origins, and run nothing'
complete -c foliomem -n "__fish_foliomem_using_subcommand run" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -s o -l output -d 'File for the trace' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l limit -d 'Memory limit for the program and its children together: 512M, 2G, 25% (of RAM, or of the container\'s memory), at least 16M; or need/2: half of their peak need so far, as if uncompressed, and at least 64M; or container: what the cgroups around the run leave for it, followed as that changes. [default of `run`: container, if there is such a cgroup; of `record`: need/2]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l sizes -d 'Folio sizes beside 4K, from 8K to 2M: 16K,64K,2M. "none" for 4K alone. A size may have a value, as in the kernel: 64K=madvise, 2M=inherit; "enabled=" (always, madvise, never) sets the value that sizes inherit. [default: 16K,32K,64K,256K]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l codec -d 'Codec of the compressed memory: lz4, zstd or zstd:LEVEL (1 to 19), or one of these with +dict, which compresses small pieces with a dictionary of the program\'s own content. [default: lz4]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l recompress -d 'While CPUs are idle, compress memory that has not been touched for some seconds again: zstd or zstd:LEVEL, or "off". [default: zstd:3 with --idle, else off]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l granule -d 'Size of the largest piece that is compressed as one, 4K to 2M. [default: 64K]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l swap -d 'Encrypted swap for memory that does not fit into the limit even compressed: a file that does not exist yet and vanishes with the run, or a block device that nothing else uses, whose content is lost. [default size of a file: 8 times the limit, but at most half of the free space]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l idle -d 'Compress all memory of a process that has used no CPU for this long: 30s, 5m; and what a process that works has not used for about twice as long. The memory comes back as it is used. Without --limit, only such memory is compressed, and the limit is the memory of the machine or the container. [default: not]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l turns -d 'If the run thrashes, let as many of its processes run as fit, while the others wait, compressed, for their turn: on or off. While a run is recorded, all run all the time. [default: on]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l stats -d 'Write counters as JSON to FILE at exit; "-" for stderr.' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l metrics -d 'Publish the figures as OpenMetrics text while the run goes on: in a file that is rewritten every 5 seconds, over a Unix socket (a path that ends with .sock), or at a port of this machine (127.0.0.1:9400).' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l report -d 'Write a page about the run to FILE at exit: its memory over time, its faults, sizes and processes, and advice. It is HTML and needs no network.' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l config -d 'Read settings from this TOML file. [default: $FOLIOMEM_CONFIG, then foliomem/config.toml in $XDG_CONFIG_HOME or ~/.config]' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l hard -d 'Stop the program (exit code 137) if its data does not compress into the limit, instead of exceeding the limit.'
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l quiet -d 'Print no summary at exit.'
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -l print-config -d 'Print the settings and their origins, and run nothing'
complete -c foliomem -n "__fish_foliomem_using_subcommand record" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l at -d 'Limits of the table: sizes, or shares of what the run needed: 75%,50%,300M. [default: from all of the need down to an eighth]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l json -d 'Write the advice as JSON to FILE; "-" for stdout, without the table' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -s o -l output -d 'Keep the trace of the run in this file' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l limit -d 'Memory limit for the program and its children together: 512M, 2G, 25% (of RAM, or of the container\'s memory), at least 16M; or need/2: half of their peak need so far, as if uncompressed, and at least 64M; or container: what the cgroups around the run leave for it, followed as that changes. [default of `run`: container, if there is such a cgroup; of `record`: need/2]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l sizes -d 'Folio sizes beside 4K, from 8K to 2M: 16K,64K,2M. "none" for 4K alone. A size may have a value, as in the kernel: 64K=madvise, 2M=inherit; "enabled=" (always, madvise, never) sets the value that sizes inherit. [default: 16K,32K,64K,256K]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l codec -d 'Codec of the compressed memory: lz4, zstd or zstd:LEVEL (1 to 19), or one of these with +dict, which compresses small pieces with a dictionary of the program\'s own content. [default: lz4]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l recompress -d 'While CPUs are idle, compress memory that has not been touched for some seconds again: zstd or zstd:LEVEL, or "off". [default: zstd:3 with --idle, else off]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l granule -d 'Size of the largest piece that is compressed as one, 4K to 2M. [default: 64K]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l swap -d 'Encrypted swap for memory that does not fit into the limit even compressed: a file that does not exist yet and vanishes with the run, or a block device that nothing else uses, whose content is lost. [default size of a file: 8 times the limit, but at most half of the free space]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l idle -d 'Compress all memory of a process that has used no CPU for this long: 30s, 5m; and what a process that works has not used for about twice as long. The memory comes back as it is used. Without --limit, only such memory is compressed, and the limit is the memory of the machine or the container. [default: not]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l turns -d 'If the run thrashes, let as many of its processes run as fit, while the others wait, compressed, for their turn: on or off. While a run is recorded, all run all the time. [default: on]' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l stats -d 'Write counters as JSON to FILE at exit; "-" for stderr.' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l metrics -d 'Publish the figures as OpenMetrics text while the run goes on: in a file that is rewritten every 5 seconds, over a Unix socket (a path that ends with .sock), or at a port of this machine (127.0.0.1:9400).' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l report -d 'Write a page about the run to FILE at exit: its memory over time, its faults, sizes and processes, and advice. It is HTML and needs no network.' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l config -d 'Read settings of the run from this TOML file, as `run` does' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l hard -d 'Stop the program (exit code 137) if its data does not compress into the limit, instead of exceeding the limit.'
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -l quiet -d 'Print no summary at exit.'
complete -c foliomem -n "__fish_foliomem_using_subcommand advise" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand ps" -l json -d 'Print the list as JSON'
complete -c foliomem -n "__fish_foliomem_using_subcommand ps" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand top" -l once -d 'Print one picture as text, and end; also if the output is no terminal'
complete -c foliomem -n "__fish_foliomem_using_subcommand top" -l json -d 'Print the list of `ps --json` with the processes of each run, and end'
complete -c foliomem -n "__fish_foliomem_using_subcommand top" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and not __fish_seen_subcommand_from sizes limit status reclaim resume" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and not __fish_seen_subcommand_from sizes limit status reclaim resume" -a "sizes" -d 'Set the folio sizes that are used from now on; without LIST, print them'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and not __fish_seen_subcommand_from sizes limit status reclaim resume" -a "limit" -d 'Change the limit. A lower one is reached in the background; this returns when it holds'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and not __fish_seen_subcommand_from sizes limit status reclaim resume" -a "status" -d 'Print what the run takes now'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and not __fish_seen_subcommand_from sizes limit status reclaim resume" -a "reclaim" -d 'Swap out now what has been unused for longest, without waiting for memory pressure'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and not __fish_seen_subcommand_from sizes limit status reclaim resume" -a "resume" -d 'Swap in now what is swapped out, ahead of its use, as far as there is room below the limit'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from sizes" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from limit" -l timeout -d 'Wait no longer than this for a lower limit to hold; 0 to return at once' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from limit" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from status" -l every -d 'Print it again every SECONDS seconds, one line of JSON each, until the run ends' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from status" -l json -d 'Print all that `run --stats` writes, and what is true at the moment, as JSON'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from status" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from reclaim" -l wait -d 'Return when it is done'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from reclaim" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from resume" -l wait -d 'Return when it is done'
complete -c foliomem -n "__fish_foliomem_using_subcommand ctl; and __fish_seen_subcommand_from resume" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand doctor" -l on -d 'Print how to mend things there, not where foliomem runs' -r -f -a "docker\t'A container of Docker'
podman\t'A container of Podman'
kubernetes\t'A pod'
systemd\t'A service of systemd'
host\t'Anything else'"
complete -c foliomem -n "__fish_foliomem_using_subcommand doctor" -s h -l help -d 'Print help (see more with \'--help\')'
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and not __fish_seen_subcommand_from unit" -l root -d 'Write below this directory instead of /, and leave the running system alone' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and not __fish_seen_subcommand_from unit" -l undo -d 'Remove what it has written, and nothing else'
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and not __fish_seen_subcommand_from unit" -s h -l help -d 'Print help'
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and not __fish_seen_subcommand_from unit" -f -a "unit" -d 'Run a service of systemd inside a limit, by a drop-in for its unit'
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and __fish_seen_subcommand_from unit" -l limit -d 'The limit of the service, as --limit of `run`' -r
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and __fish_seen_subcommand_from unit" -l root -d 'Write below this directory instead of /, and leave the running system alone' -r -F
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and __fish_seen_subcommand_from unit" -l undo -d 'Remove what it has written, and nothing else'
complete -c foliomem -n "__fish_foliomem_using_subcommand setup; and __fish_seen_subcommand_from unit" -s h -l help -d 'Print help'
