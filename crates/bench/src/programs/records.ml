(* The records of `foliomem bench languages` in OCaml: arguments are the records and the rounds. Each round replaces a
   quarter of the records and reads others at random; the printed total depends on all of them. *)
type entry = { name : string; counts : int list; sum : int }

let count = int_of_string Sys.argv.(1)
let rounds = int_of_string Sys.argv.(2)

let words =
  [| "north"; "river"; "stone"; "market"; "winter"; "copper"; "garden"; "silver";
     "harbour"; "meadow"; "lantern"; "orchard"; "thunder"; "village"; "whisper"; "yellow" |]

let seed = ref 1
let total = ref 0

let random below =
  seed := !seed * 16807 mod 2147483647;
  !seed mod below

let make () =
  let first = words.(random 16) in
  let second = words.(random 16) in
  let name = String.concat "-" [ first; second; string_of_int (random 100000) ] in
  let counts = ref [] in
  for _ = 1 to 8 do
    counts := random 1000 :: !counts
  done;
  { name; counts = !counts; sum = List.fold_left ( + ) 0 !counts }

let verify entry =
  if List.fold_left ( + ) 0 entry.counts <> entry.sum then failwith ("a record has changed: " ^ entry.name)

let add number = total := ((!total * 31) + number) mod 2147483647

let () =
  let entries = Array.make count { name = ""; counts = []; sum = 0 } in
  for i = 0 to count - 1 do
    entries.(i) <- make ()
  done;
  for _ = 1 to rounds do
    let start = random count in
    for k = 0 to (count / 4) - 1 do
      let i = (start + k) mod count in
      let old = entries.(i) in
      verify old;
      entries.(i) <- make ();
      add (String.length (String.concat "+" (List.rev (String.split_on_char '-' old.name))))
    done;
    for _ = 1 to count / 16 do
      add entries.(random count).sum
    done
  done;
  let finish entry =
    verify entry;
    add (entry.sum + String.length entry.name)
  in
  Array.iter finish entries;
  Printf.printf "%d\n" !total
