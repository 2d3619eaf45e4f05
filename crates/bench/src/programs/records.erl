#!/usr/bin/env escript
%% The records of `foliomem bench languages` in Erlang: arguments are the records and the rounds. Each round replaces a
%% quarter of the records and reads others at random; the printed total depends on all of them.
-mode(compile).

words() ->
    {"north", "river", "stone", "market", "winter", "copper", "garden", "silver",
     "harbour", "meadow", "lantern", "orchard", "thunder", "village", "whisper", "yellow"}.

random(Below) ->
    Seed = get(seed) * 16807 rem 2147483647,
    put(seed, Seed),
    Seed rem Below.

word() -> element(random(16) + 1, words()).

make() ->
    First = word(),
    Second = word(),
    Name = list_to_binary([First, "-", Second, "-", integer_to_list(random(100000))]),
    Counts = [random(1000) || _ <- lists:seq(1, 8)],
    {Name, Counts, lists:sum(Counts)}.

verify({Name, Counts, Sum}) ->
    case lists:sum(Counts) of
        Sum -> ok;
        _ -> error({"a record has changed", Name})
    end.

add(Number) -> put(total, (get(total) * 31 + Number) rem 2147483647).

replace(I, Entries) ->
    #{I := {Name, _, _} = Old} = Entries,
    verify(Old),
    New = make(),
    add(iolist_size(lists:join("+", lists:reverse(binary:split(Name, <<"-">>, [global]))))),
    Entries#{I := New}.

rounds(0, _, Entries) -> Entries;
rounds(Left, Count, Entries) ->
    Start = random(Count),
    Replaced = lists:foldl(fun(K, All) -> replace((Start + K) rem Count, All) end, Entries, lists:seq(0, Count div 4 - 1)),
    [begin #{I := {_, _, Sum}} = Replaced, add(Sum) end || _ <- lists:seq(1, Count div 16), I <- [random(Count)]],
    rounds(Left - 1, Count, Replaced).

main([CountText, RoundsText]) ->
    Count = list_to_integer(CountText),
    put(seed, 1),
    put(total, 0),
    Made = lists:foldl(fun(I, All) -> All#{I => make()} end, #{}, lists:seq(0, Count - 1)),
    Entries = rounds(list_to_integer(RoundsText), Count, Made),
    Finish = fun(I) ->
        #{I := {Name, _, Sum} = Entry} = Entries,
        verify(Entry),
        add(Sum + byte_size(Name))
    end,
    lists:foreach(Finish, lists:seq(0, Count - 1)),
    io:format("~b~n", [get(total)]).
