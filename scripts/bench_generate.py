"""Times how fast a config's model continues texts; its weights are drawn.

    python scripts/bench_generate.py --config configs/llama3_1b.py [--config.x=y ...] \\
        [--batches=1,64] [--prompt_tokens=128] [--max_tokens=512]

One JSON record for each number of texts: milliseconds a token, tokens a second of all texts, and
the share of the time in which the memory could have read once what a step reads.
"""

import json

from absl import app, flags

from jaxscale.command_line import EXIT_MISTAKE, parse_own_flags, read_config, tell

BATCHES = flags.DEFINE_list("batches", ["1", "64"], "Texts that are continued at once.")
PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 128, "Of each text.", lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 512, "Made of each text.", lower_bound=64)
TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0: always the likeliest.")
TOP_K = flags.DEFINE_integer("top_k", 0, "0: among all.")
TOP_P = flags.DEFINE_float("top_p", 1.0, "1: among all.")
COMMIT = flags.DEFINE_string("commit", "", "To put on record where this is no git checkout.")


def main(argv: list[str]) -> int:
    from jaxscale.inference.sampling import Sampling
    from jaxscale.perf import generate_speed
    from jaxscale.perf.provenance import provenance
    from jaxscale.xla.environment import set_environment

    try:
        set_environment()
        config = read_config(argv[1:])
        sampling = Sampling(
            temperature=TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value, seed=0
        )
        records = generate_speed.measure(
            config.model,
            batches=[int(number) for number in BATCHES.value],
            prompt_tokens=PROMPT_TOKENS.value,
            max_tokens=MAX_TOKENS.value,
            sampling=sampling,
        )
        for record in records:
            least, seconds = record["least_seconds"], record["step_seconds"]
            share = f", {least / seconds:.1%} of what the bandwidth allows" if least else ""
            print(
                f"{record['num_texts']} texts: {1000 * seconds:.2f} ms a token, "
                f"{record['tokens_per_second']:,.0f} tokens/s{share}"
            )
            print(json.dumps(record | provenance(commit=COMMIT.value)), flush=True)
    except ValueError as error:
        return tell(error, EXIT_MISTAKE)
    return 0


if __name__ == "__main__":
    app.run(main, flags_parser=parse_own_flags)
