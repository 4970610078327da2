//! The mistakes, as edits of the shipping source.

/// A piece of text that becomes another.
pub struct Edit {
    /// File, from the workspace's root.
    pub file: &'static str,
    /// Text that stands in it exactly once.
    pub from: &'static str,
    /// What it becomes.
    pub to: &'static str,
}

/// A classic mistake.
pub struct Mutation {
    /// Which part, and what is wrong.
    pub name: &'static str,
    /// How it is made here.
    pub edits: &'static [Edit],
}

const LOWER: &str = "crates/model/src/lower.rs";
const GDN: &str = "crates/cpu/src/kernels/gdn.rs";
const PREP: &str = "crates/cpu/src/kernels/attention/prep.rs";
const ATTENTION: &str = "crates/cpu/src/kernels/attention.rs";
const ELEMENTWISE: &str = "crates/cpu/src/kernels/elementwise.rs";

const fn edit(file: &'static str, from: &'static str, to: &'static str) -> Edit {
    Edit { file, from, to }
}

/// Without the l2 norm's epsilon, whose place changes no logit by more than 5e-6.
pub const MUTATIONS: &[Mutation] = &[
    Mutation {
        name: "GDN: a and b swapped",
        edits: &[edit(
            LOWER,
            "DeltaGates { a, b, a_log, dt_bias, decay, beta }",
            "DeltaGates { a: b, b: a, a_log, dt_bias, decay, beta }",
        )],
    },
    Mutation {
        name: "GDN: value head h uses key head h % Hk (GGUF order)",
        edits: &[edit(
            GDN,
            "let key_head = b.head / (value_heads / key_heads);",
            "let key_head = b.head % key_heads;",
        )],
    },
    Mutation {
        name: "GDN: conv taps reversed",
        edits: &[edit(
            GDN,
            "weight[(i % channels) * taps + i / channels]",
            "weight[(i % channels) * taps + taps - 1 - i / channels]",
        )],
    },
    Mutation { name: "GDN: conv without silu", edits: &[edit(GDN, "math::silu::<S>(sum)", "sum")] },
    Mutation {
        name: "GDN: q not scaled by dk^-0.5",
        edits: &[edit(GDN, "(1.0 / (shape.dk as f64).sqrt()) as f32", "1.0f32")],
    },
    Mutation {
        name: "GDN: no l2norm on q, k",
        edits: &[edit(
            GDN,
            "S::splat(1.0 / (square + L2_EPS).sqrt())",
            "S::splat(1.0 + 0.0 * (square + L2_EPS))",
        )],
    },
    Mutation {
        name: "GDN: delta computed before decay",
        edits: &[edit(
            GDN,
            "                    s[r][c] = S::mul(s[r][c], g);
                    sum[r] = S::fma(s[r][c], k, sum[r]);",
            "                    sum[r] = S::fma(s[r][c], k, sum[r]);
                    s[r][c] = S::mul(s[r][c], g);",
        )],
    },
    Mutation {
        name: "GDN: output read before update",
        edits: &[edit(
            GDN,
            "                    s[r][c] = S::fma(delta[r], k, s[r][c]);
                    sum[r] = S::fma(s[r][c], q, sum[r]);",
            "                    sum[r] = S::fma(s[r][c], q, sum[r]);
                    s[r][c] = S::fma(delta[r], k, s[r][c]);",
        )],
    },
    Mutation {
        name: "GDN: gate sigmoid(z) instead of silu(z)",
        edits: &[edit(
            GDN,
            "math::silu::<S>(S::load(z.as_ptr().add(c)))",
            "math::sigmoid::<S>(S::load(z.as_ptr().add(c)))",
        )],
    },
    Mutation {
        name: "GDN: gate before norm",
        edits: &[
            edit(
                GDN,
                "            let r = S::splat(inverse_rms::<S>(y.as_ptr(), dv, norm.eps));",
                "            for c in (0..dv).step_by(16) {
                let gate = math::silu::<S>(S::load(z.as_ptr().add(c)));
                let p = y.as_mut_ptr().add(c);
                S::store(p, S::mul(S::load(p), gate));
            }
            let r = S::splat(inverse_rms::<S>(y.as_ptr(), dv, norm.eps));",
            ),
            edit(
                GDN,
                "S::store(y.as_mut_ptr().add(c), S::mul(n, gate));",
                "let _ = gate; S::store(y.as_mut_ptr().add(c), n);",
            ),
        ],
    },
    Mutation {
        name: "GDN: +1 added to gated-norm weight",
        edits: &[edit(
            GDN,
            "S::load(norm.weight.as_ptr().add(c))",
            "S::add(S::load(norm.weight.as_ptr().add(c)), S::splat(1.0))",
        )],
    },
    Mutation {
        name: "GDN: state kept in bf16 between tokens",
        edits: &[edit(
            GDN,
            "S::store(state.add((r * C + c) * 16), lanes);",
            "S::store(state.add((r * C + c) * 16), S::round_bf16(lanes));",
        )],
    },
    Mutation {
        name: "norms: +1 added again (MLX already baked it in)",
        edits: &[edit(
            "crates/cpu/src/kernels/norm.rs",
            "S::mul(S::mul(load_n::<S>(x), r), load_n::<S>(w))",
            "S::mul(S::mul(load_n::<S>(x), r), S::add(load_n::<S>(w), S::splat(1.0)))",
        )],
    },
    Mutation {
        name: "attention: q/gate split as two big halves, not per head",
        edits: &[edit(
            PREP,
            "[(p.row * heads + h) * 2 * head_dim..]",
            "[(p.row * 2 * heads + h) * head_dim..]",
        )],
    },
    Mutation {
        name: "attention: gate first, then q, in each head",
        edits: &[
            edit(
                PREP,
                "[(p.row * heads + h) * 2 * head_dim..]",
                "[((p.row * heads + h) * 2 + 1) * head_dim..]",
            ),
            edit(ELEMENTWISE, "[(2 * head + 1) * head_dim..]", "[2 * head * head_dim..]"),
        ],
    },
    Mutation {
        name: "attention: no output gate",
        edits: &[edit(
            ELEMENTWISE,
            "S::mul(load_n::<S>(o), math::sigmoid::<S>(load_n::<S>(gate)))",
            "{ let _ = gate; load_n::<S>(o) }",
        )],
    },
    Mutation {
        name: "attention: silu gate",
        edits: &[edit(
            ELEMENTWISE,
            "math::sigmoid::<S>(load_n::<S>(gate))",
            "math::silu::<S>(load_n::<S>(gate))",
        )],
    },
    Mutation {
        name: "attention: rope on interleaved pairs (2i, 2i+1)",
        edits: &[edit(
            PREP,
            "        for i in (0..half).step_by(16) {",
            "        for i in 0..half {
            let (a, b, c, s) = (out[2 * i], out[2 * i + 1], rope.0[i], rope.1[i]);
            out[2 * i] = a * c - b * s;
            out[2 * i + 1] = a * s + b * c;
        }
        for i in (0..half.min(0)).step_by(16) {",
        )],
    },
    Mutation {
        name: "attention: rope over the whole head_dim",
        edits: &[edit(LOWER, "dims: c.rope_dims", "dims: c.head_dim")],
    },
    Mutation {
        name: "attention: rope before q/k norm",
        edits: &[
            edit(
                PREP,
                "    let half = rope.0.len();
    // SAFETY: `x`",
                "    let half = rope.0.len();
    let mut rotated = x.to_vec();
    for i in 0..half {
        rotated[i] = x[i] * rope.0[i] - x[half + i] * rope.1[i];
        rotated[half + i] = x[i] * rope.1[i] + x[half + i] * rope.0[i];
    }
    let x = &rotated[..];
    // SAFETY: `x`",
            ),
            edit(
                PREP,
                "        for i in (0..half).step_by(16) {",
                "        for i in (0..half.min(0)).step_by(16) {",
            ),
        ],
    },
    Mutation {
        name: "attention: GQA head h uses KV head h % nkv",
        edits: &[edit(
            ATTENTION,
            "kv_head: tile.head / shape.group()",
            "kv_head: tile.head % shape.kv_heads",
        )],
    },
    Mutation {
        name: "moe: top-k weights not renormalised",
        edits: &[edit(
            "crates/cpu/src/kernels/router.rs",
            "weights.iter_mut().for_each(|w| *w /= sum);",
            "let _ = sum;",
        )],
    },
    Mutation {
        name: "moe: shared expert without sigmoid gate",
        edits: &[edit(
            ELEMENTWISE,
            "math::sigmoid::<S>(S::splat(input.shared_gate[row]))",
            "S::splat(1.0)",
        )],
    },
    Mutation {
        name: "moe: shared expert missing",
        edits: &[edit(
            ELEMENTWISE,
            "acc = S::fma(gate, load_n::<S>(&shared[c..end]), acc);",
            "let _ = (gate, shared);",
        )],
    },
    Mutation {
        name: "moe: gate and up swapped",
        edits: &[edit(
            LOWER,
            "ExpertsIn { x, ids, gate, up, activation, out: inner }",
            "ExpertsIn { x, ids, gate: up, up: gate, activation, out: inner }",
        )],
    },
    Mutation {
        name: "quant: high nibble first inside each byte",
        edits: &[
            edit(
                "crates/cpu/src/simd/avx512.rs",
                "_mm512_or_si512(bytes, _mm512_slli_epi64::<28>(bytes))",
                "_mm512_or_si512(_mm512_srli_epi64::<4>(bytes), _mm512_slli_epi64::<32>(bytes))",
            ),
            edit(
                "crates/cpu/src/simd/avx2.rs",
                "let shifted = both!(_mm256_slli_epi64::<28>, bytes);",
                "let shifted = both!(_mm256_slli_epi64::<32>, bytes);
            let bytes = both!(_mm256_srli_epi64::<4>, bytes);",
            ),
            edit("crates/cpu/src/simd/portable.rs", "(4 * (i % 2))", "(4 * (1 - i % 2))"),
            edit(
                "crates/cpu/src/simd/neon.rs",
                "vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high))",
                "vcombine_u8(vzip1_u8(high, low), vzip2_u8(high, low))",
            ),
        ],
    },
];
