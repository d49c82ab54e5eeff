"""Reinforcement learning whose whole training is one compiled ``lax.scan``: generate, reward, score, update, again.

    python examples/generate_in_scan.py

The model is rewarded for every token that is one more than the token before it. A step samples a batch of outputs with
``jf.decode.generate_arrays``, scores them with ``jf.logprobs`` and follows the policy gradient (REINFORCE, Williams 1992; the
mean reward is the baseline). The temperature falls from step to step: it is an array, and nothing is compiled again.
No array leaves the device before the end, and no line of the library changed.
"""

import jax
import jax.numpy as jnp
import optax

import jaxformer as jf

STEPS, ROWS, NEW, VOCAB = 200, 64, 8, 12
cfg = jf.presets.llama(vocab_size=VOCAB, d_model=32, n_layers=1, n_heads=2, max_length=16)
adam = optax.adam(1e-2)


def reward(tokens: jax.Array) -> jax.Array:
    """1 for every token that is one more than the token before it, else 0: [B, T - 1]."""
    return (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCAB).astype(jnp.float32)


def objective(params: dict, tokens: jax.Array, advantage: jax.Array) -> jax.Array:
    return -(jf.logprobs(params, tokens, cfg)[:, 1:] * advantage).mean()


def step(carry, x):
    params, opt_state = carry
    key, temperature = x
    starts_key, sampling_key = jax.random.split(key)
    starts = jax.random.randint(starts_key, (ROWS, 1), 0, VOCAB)
    out = jf.decode.generate_arrays(
        params,
        starts,
        jnp.ones(ROWS, jnp.int32),
        cfg,
        max_new_tokens=NEW,
        sampling={"temperature": temperature},
        key=sampling_key,
    )
    tokens = jnp.concatenate([starts, out.tokens], axis=1)
    rewards = reward(tokens)
    grads = jax.grad(objective)(params, tokens, rewards - rewards.mean())
    updates, opt_state = adam.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), rewards.mean()


@jax.jit
def train(params: dict, key: jax.Array) -> tuple[dict, jax.Array]:
    """Parameters after all steps, and the mean reward of every step."""
    steps = jax.random.split(key, STEPS), jnp.linspace(1.0, 0.5, STEPS)
    (params, _), rewards = jax.lax.scan(step, (params, adam.init(params)), steps)
    return params, rewards


def main() -> None:
    params, rewards = train(jf.init(cfg, jax.random.key(0)), jax.random.key(2))
    for number in range(0, STEPS, STEPS // 4):
        print(f"steps from {number}: mean reward {float(rewards[number : number + STEPS // 4].mean()):.3f}")
    print("greedy after 3:", jf.generate(params, [[3]], cfg, max_new_tokens=NEW).tokens[0].tolist())


if __name__ == "__main__":
    main()
