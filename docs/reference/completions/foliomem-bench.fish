# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_foliomem_bench_global_optspecs
    string join \n h/help V/version
end

function __fish_foliomem_bench_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_foliomem_bench_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_foliomem_bench_using_subcommand
    set -l cmd (__fish_foliomem_bench_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -s V -l version -d 'Print version'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "swap" -d 'Swap-out and swap-in speed and compression ratio by folio size, codec, granule and threads'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "slots" -d 'Allocation of swap slots: time, scanned clusters and fallbacks by strategy, order, threads and fill level'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "compact" -d 'Compaction: success, pages moved and time of making a run of frames, by compaction variant and order'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "programs" -d 'Real programs: without a limit, under the kernel\'s, and under foliomem\'s with equal total'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "languages" -d 'Small programs in many languages, most with a garbage collector, in the same settings'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "access" -d 'Access patterns at limits of 75, 50 and 25% of need, by folio size, next to the kernel at an equal total'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "limit" -d 'Growing programs in memory cgroups: how far they exceed a fixed limit, and how many the kernel kills. Needs root and a C compiler'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "advise" -d 'Compare the slowdown that `foliomem advise` predicts with that of real programs'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "start" -d 'The shortest program, plain and in a run, in turns: what the start of a run takes'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "density" -d 'Idle sandboxes in a fixed amount of memory, plain, swapped out to zram by the kernel, and under --idle: how many fit, how long one takes to be ready, and to answer a query over all its data. Needs Python with pandas'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "lab" -d 'Speed of the lab\'s simulations, and its memory for each simulated page'
complete -c foliomem-bench -n "__fish_foliomem_bench_needs_command" -f -a "calibrate" -d 'Costs of this machine, for `foliomem lab calibrate`'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand swap" -l sizes -d 'Folio sizes. [default: 4K,16K,64K,256K,2M]' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand swap" -l codec -d 'Codecs, as --codec of `run`, such as lz4,zstd:5,zstd+dict' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand swap" -l granule -d 'Sizes of the largest piece that is compressed as one, 4K to 2M, such as 4K,16K,64K' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand swap" -l threads -d 'Numbers of compressing threads, and of touching threads, such as 1,2' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand swap" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand swap" -l no-kernel -d 'Do not measure the kernel'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand swap" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand slots" -l strategies -d 'Only these: per-cpu-linear, cluster-lists, one-fragment, nonfull-first' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand slots" -l orders -d 'Folio orders, 0 (4K) to 9 (2M). [default: 0,2,4,9]' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand slots" -l threads -d 'Numbers of threads. [default: 1,2,4,8]' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand slots" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand slots" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand compact" -l variants -d 'Only these: split-folios, migrate-whole, +free-split, +sort-sources' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand compact" -l orders -d 'Orders, 1 (8K) to 9 (2M). [default: 4,9]' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand compact" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand compact" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand programs" -l only -d 'Only these: numpy, redis, compile, make' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand programs" -l runs -d 'Runs of each setting, of which the median counts; a setting that takes longer than 45 s runs once' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand programs" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand programs" -l no-kernel -d 'Do not measure the kernel'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand programs" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand languages" -l only -d 'Only these: lua, luajit, perl, guile, ruby, ocaml, erlang, pandas, node, java-g1, java-zgc' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand languages" -l runs -d 'Runs of each setting, of which the median counts; a setting that takes longer than 45 s runs once' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand languages" -l percent -d 'The kernel\'s limit in per cent of the need, 10 to 100' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand languages" -l scale -d 'The data of the programs in per cent of their usual data, 1 to 1000' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand languages" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand languages" -l no-kernel -d 'Do not measure the kernel'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand languages" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l only -d 'Only these: sequential, strided, zipf, random' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l settings -d 'Only these of foliomem\'s settings: default, 4K, 16K, 64K, 256K, 2M' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l need -d 'The memory that the program touches in MiB, 16 to 1048576' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l touches -d 'Timed touches for each page of that memory' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l threads -d 'Numbers of threads, each of which touches a part of the memory, such as 1,2,4' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l limits -d 'Limits, 10 to 100 per cent of the need, joined by commas' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l runs -d 'Runs of each setting, of which the median counts' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -l no-kernel -d 'Do not measure the kernel'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand access" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand limit" -l only -d 'Only these: small-blocks, large-blocks, array, forks, inline, lazy, numpy, java' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand limit" -l runs -d 'Runs of each program. Every cgroup has its turn, first idle, then with all CPUs busy' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand limit" -l margin -d 'How far foliomem\'s limit is below the cgroup\'s, in per cent, or "container": as far as foliomem finds necessary (`--limit container`)' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand limit" -l groups -d 'Limits of the cgroups in MiB, 64 to 65536' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand limit" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand limit" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand advise" -l only -d 'Only these: numpy, compile, sqlite, redis, java' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand advise" -l runs -d 'Runs within each limit, of which the median counts' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand advise" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand advise" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand start" -l runs -d 'Runs of each setting, of which the median counts' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand start" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand start" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand density" -l total -d 'The memory of all sandboxes in MiB, 512 to 1048576' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand density" -l ratings -d 'The ratings in a sandbox\'s frame' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand density" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand density" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand lab" -l runs -d 'Runs of each case, of which the median counts' -r
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand lab" -l json -d 'Print rows as a JSON array'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand lab" -s h -l help -d 'Print help'
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand calibrate" -s o -l output -d 'File for the costs. [default: stdout]' -r -F
complete -c foliomem-bench -n "__fish_foliomem_bench_using_subcommand calibrate" -s h -l help -d 'Print help'
