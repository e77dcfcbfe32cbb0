# A sampler in awk: reads toast-frames --json, answers each logits frame with a token frame.
#   -v temperature=T   0 takes the most likely token
#   -v k=K             how many of the most likely tokens to choose from
#   -v seed=N          the same seed draws the same tokens (with the same awk)
BEGIN {
    if (temperature !~ /^[0-9]*\.?[0-9]+$/ || k !~ /^[1-9][0-9]*$/) {
        print "sampler.awk: T is a decimal number, 0 or more, and K a whole one" > "/dev/stderr"
        exit 64
    }
    srand(seed)
}

!/^."k": "logits"/ { print; fflush(); next }  # toast-feed wants the head, toast-detokenize the end

{
    match($0, /"pos": [0-9]+/)
    position = substr($0, RSTART + 7, RLENGTH - 7)
    sub(/.*"topk": \[\[/, "")  # what is left: 43, -0.1], [737, -2.5], ... most likely first
    sub(/\]\].*/, "")
    n = split($0, pair, /\], \[/)
    if (n > k) n = k
    sum = 0
    for (i = 1; i <= n; i++) {
        split(pair[i], field, /, /)
        id[i] = field[1]
        if (i == 1) best = field[2]
        weight[i] = temperature > 0 ? exp((field[2] - best) / temperature) : (i == 1)
        sum += weight[i]
    }
    draw = rand() * sum
    for (i = 1; i < n && draw >= weight[i]; i++) draw -= weight[i]
    printf "{\"k\": \"token\", \"pos\": %d, \"id\": %d}\n", position, id[i]
    fflush()  # decode waits for this line
}
