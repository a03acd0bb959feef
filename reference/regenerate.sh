#!/usr/bin/env bash
# Writes everything in this folder again, with the commands of README.txt, in the environment whose numbers you want:
# bash reference/regenerate.sh
set -eu
cd "$(dirname "$0")/.."
mkdir -p reference/printed

python -B rl_lab.py --algorithm atoms > reference/printed/atoms.txt
python -B rl_lab.py --algorithm all --output reference/results > reference/printed/all.txt
python -B plot_results.py --input reference/results --output reference/training-curves.svg
python -B plot_results.py --atoms --output reference/atoms.svg

python -B ppo_chain.py --gae-lambda 0,0.95,1 --output reference/results-chain > reference/printed/chain-lambdas.txt
python -B ppo_chain.py --seed 7 --gae-lambda 0.95 --output reference/results-chain-lambda0.95 > reference/printed/chain.txt
python -B plot_results.py --input reference/results-chain-lambda0 reference/results-chain-lambda0.95 reference/results-chain-lambda1 --output reference/chain.svg

python -B token_objectives.py --output reference/results-tokens.json > reference/printed/tokens.txt

python -B rl_lab.py --algorithm dpo --preference-flips 0,3,6,12 --output reference/results-dpo > reference/printed/dpo-flips.txt
python -B plot_results.py --input reference/results-dpo-flips0 reference/results-dpo-flips3 reference/results-dpo-flips6 reference/results-dpo-flips12 --output reference/flips.svg

python -B rl_lab.py --algorithm grpo --group-size 2,4,8,16 --grpo-prompts 64,32,16,8 --output reference/results-grpo > reference/printed/grpo-sizes.txt
python -B plot_results.py --input reference/results-grpo-g2 reference/results-grpo-g4 reference/results-grpo-g8 reference/results-grpo-g16 --output reference/group-sizes.svg

# Twenty seeds: the printed medians and the figure are kept, the sixty CSV files are not.
seeds=$(mktemp -d)
python -B rl_lab.py --algorithm all --seeds 0-19 --output "$seeds/results-seeds" > "$seeds/printed.txt"
sed '/^Files/,$d' "$seeds/printed.txt" > reference/printed/seeds.txt
python -B plot_results.py --input "$seeds/results-seeds" --output reference/seeds.svg
rm -r "$seeds"
