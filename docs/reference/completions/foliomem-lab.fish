# Print an optspec for argparse to handle cmd's options that are independent of any subcommand.
function __fish_foliomem_lab_global_optspecs
    string join \n h/help V/version
end

function __fish_foliomem_lab_needs_command
    # Figure out if the current invocation already has a command.
    set -l cmd (commandline -opc)
    set -e cmd[1]
    argparse -s (__fish_foliomem_lab_global_optspecs) -- $cmd 2>/dev/null
    or return
    if set -q argv[1]
        # Also print the command, so this can be used to figure out what it is.
        echo $argv[1]
        return 1
    end
    return 0
end

function __fish_foliomem_lab_using_subcommand
    set -l cmd (__fish_foliomem_lab_needs_command)
    test -z "$cmd"
    and return 1
    contains -- $cmd[1] $argv
end

complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -s V -l version -d 'Print version'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "list" -d 'List the scenarios that come with foliomem'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "run" -d 'Run a scenario, or many that differ in some settings'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "replay" -d 'Replay a recorded run at another limit and with other settings'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "sweep" -d 'Run a scenario, as `run` does, on the machines of a Ray cluster: needs `foliomem_lab`, a Python package'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "advise" -d 'Predict how much slower a recorded run would be within other limits'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "export" -d 'Write a recorded run as a table: a Parquet file with a row for each event'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "seeds" -d 'Compare published results with the lab\'s; all of them take some 15 minutes of CPU'
complete -c foliomem-lab -n "__fish_foliomem_lab_needs_command" -f -a "calibrate" -d 'Measure the costs of this machine: writes a file for --costs of `run`, `replay` and `sweep`'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand list" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand run" -l vary -l set -d 'Replace a setting of the scenario (docs/lab/guide.md has the keys): swap.strategy=one-fragment,nonfull-first runs both; several of these options run every combination. Settings that are lists take values joined by +, or nothing: machine.sizes_kib=,64,64+2048 runs three. codec, granule or strategy without a value runs all values' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand run" -l costs -d 'Cost table that `lab calibrate` has written. [default: that of the reference machine]' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand run" -l json -d 'Write the runs as a JSON array to FILE; "-" for stdout, without the table' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand run" -l html -d 'Write the runs as a self-contained page with tables and plots' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand run" -l parquet -d 'Write the runs as a Parquet file: a row for each run, a column for each setting and result' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand run" -l threads -d 'Threads for the runs. [default: one for each CPU]' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand run" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l limit -d 'Memory limits: sizes, or shares of the peak of the recorded run: 75%,50%,300M' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l sizes -d 'Folio sizes beside 4K: 64K, or 16K,64K,2M; "none" for 4K alone' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l vary -l set -d 'Replace a setting of the scenario (docs/lab/guide.md has the keys): swap.strategy=one-fragment,nonfull-first runs both; several of these options run every combination. Settings that are lists take values joined by +, or nothing: machine.sizes_kib=,64,64+2048 runs three. codec, granule or strategy without a value runs all values' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l costs -d 'Cost table that `lab calibrate` has written. [default: that of the reference machine]' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l json -d 'Write the runs as a JSON array to FILE; "-" for stdout, without the table' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l html -d 'Write the runs as a self-contained page with tables and plots' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l parquet -d 'Write the runs as a Parquet file: a row for each run, a column for each setting and result' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -l threads -d 'Threads for the runs. [default: one for each CPU]' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand replay" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand sweep" -l ray -d 'The cluster, as ray.init takes it: HOST:PORT of its head, ray://HOST:PORT, or auto for this machine\'s cluster' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand sweep" -l vary -l set -d 'Replace a setting of the scenario (docs/lab/guide.md has the keys): swap.strategy=one-fragment,nonfull-first runs both; several of these options run every combination. Settings that are lists take values joined by +, or nothing: machine.sizes_kib=,64,64+2048 runs three. codec, granule or strategy without a value runs all values' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand sweep" -l costs -d 'Cost table that `lab calibrate` has written. [default: that of the reference machine]' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand sweep" -l json -d 'Write the runs as a JSON array to FILE; "-" for stdout, without the table' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand sweep" -l html -d 'Write the runs as a self-contained page with tables and plots' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand sweep" -l parquet -d 'Write the runs as a Parquet file: a row for each run, a column for each setting and result' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand sweep" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand advise" -l at -d 'Limits of the table: sizes, or shares of what the run needed: 75%,50%,300M. [default: from all of the need down to an eighth]' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand advise" -l json -d 'Write the advice as JSON to FILE; "-" for stdout, without the table' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand advise" -l threads -d 'Threads for the replays. [default: one for each CPU]' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand advise" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand export" -s o -l output -d 'File for the table' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand export" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand seeds" -l only -d 'Only rows whose series, table, workload, configuration or metric contains TEXT: "patch 2", usemem, "sys time"' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand seeds" -l threads -d 'Threads for the runs. [default: one for each CPU]' -r
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand seeds" -l json -d 'Print rows as a JSON array'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand seeds" -s h -l help -d 'Print help'
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand calibrate" -s o -l output -d 'File for the costs. [default: stdout]' -r -F
complete -c foliomem-lab -n "__fish_foliomem_lab_using_subcommand calibrate" -s h -l help -d 'Print help'
