//! Switches of the optimisations, one each: so that every one can be left out and measured.

/// On is the optimisation, off is what it is compared with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuning {
    /// Prefill GEMMs dequantize 4-bit weights tile by tile; off: a pass of its own expands them to memory.
    pub dequantize_in_gemm: bool,
    /// Expert routing stays on the device; off: it is read back and resubmitted by the host in each layer.
    pub gpu_routing: bool,
    /// 32-row tiles with a tail of 16-row tiles, by the rows' distribution; off: 16 rows always.
    pub adaptive_tiles: bool,
    /// The prefill scan keeps the recurrent state in registers; off: blocks of 32 tokens through memory.
    pub register_scan: bool,
    /// With `mma.sync`: the prefill scan goes chunk by chunk, by matrix units; off: token by token.
    pub chunked_scan: bool,
    /// Convolution, silu, q/k normalization and gates of the recurrent layers are one kernel; off: one each.
    pub fuse_conv: bool,
    /// Decode: a norm and the projections that read it are one kernel; off: the norm is its own.
    pub fuse_norm: bool,
    /// CUDA, products of few rows: matrix units, for which eight rows cost what one costs; off: products lane by lane.
    pub matrix_gemv: bool,
    /// Decode: expert in-projections and the gated activation are one kernel.
    pub fuse_experts_in: bool,
    /// Decode: expert out-projections, routing scores, shared expert and residual are one kernel.
    pub fuse_experts_out: bool,
    /// Decode: q/k normalization, rotary embedding and the cache write are one kernel.
    pub fuse_qk_prep: bool,
    /// Decode: the recurrence and its gated norm are one kernel.
    pub fuse_scan_norm: bool,
    /// Tokens are chosen on the device and handed to the next step there; off: by the host from read-back logits.
    pub token_handoff: bool,
    /// Lanes read neighbouring elements of K and V; off: each lane reads a row of its own.
    pub coalesced_kv: bool,
    /// Four query heads that share a KV head share a threadgroup's reads; off: one head a simdgroup.
    pub pack_heads: bool,
    /// CUDA, fixed blocks of attention: matrix units, all heads that share a KV head at once; off: products lane by lane.
    pub matrix_attention: bool,
    /// At 32K tokens and above attention is split at fixed blocks of whole pages, where the shape allows.
    pub fixed_block: bool,
    /// Dispatches without a data dependency run together; off: one after another.
    pub concurrent: bool,
    /// Values that are never alive together share memory.
    pub reuse_buffers: bool,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            dequantize_in_gemm: true,
            gpu_routing: true,
            adaptive_tiles: true,
            register_scan: true,
            chunked_scan: true,
            fuse_conv: true,
            fuse_norm: true,
            matrix_gemv: true,
            fuse_experts_in: true,
            fuse_experts_out: true,
            fuse_qk_prep: true,
            fuse_scan_norm: true,
            token_handoff: true,
            coalesced_kv: true,
            pack_heads: true,
            matrix_attention: true,
            fixed_block: true,
            concurrent: true,
            reuse_buffers: true,
        }
    }
}

/// A switch: its name and the field.
pub type Switch = (&'static str, fn(&mut Tuning) -> &mut bool);

impl Tuning {
    /// All switches.
    pub const SWITCHES: &'static [Switch] = &[
        ("dequantize_in_gemm", |t| &mut t.dequantize_in_gemm),
        ("gpu_routing", |t| &mut t.gpu_routing),
        ("adaptive_tiles", |t| &mut t.adaptive_tiles),
        ("register_scan", |t| &mut t.register_scan),
        ("chunked_scan", |t| &mut t.chunked_scan),
        ("fuse_conv", |t| &mut t.fuse_conv),
        ("fuse_norm", |t| &mut t.fuse_norm),
        ("matrix_gemv", |t| &mut t.matrix_gemv),
        ("fuse_experts_in", |t| &mut t.fuse_experts_in),
        ("fuse_experts_out", |t| &mut t.fuse_experts_out),
        ("fuse_qk_prep", |t| &mut t.fuse_qk_prep),
        ("fuse_scan_norm", |t| &mut t.fuse_scan_norm),
        ("token_handoff", |t| &mut t.token_handoff),
        ("coalesced_kv", |t| &mut t.coalesced_kv),
        ("pack_heads", |t| &mut t.pack_heads),
        ("matrix_attention", |t| &mut t.matrix_attention),
        ("fixed_block", |t| &mut t.fixed_block),
        ("concurrent", |t| &mut t.concurrent),
        ("reuse_buffers", |t| &mut t.reuse_buffers),
    ];

    /// The default with one switch off.
    pub fn without(name: &str) -> Option<Self> {
        let (_, field) = Self::SWITCHES.iter().find(|(n, _)| *n == name)?;
        let mut tuning = Self::default();
        *field(&mut tuning) = false;
        Some(tuning)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_switch_is_its_own_field() {
        let mut seen = std::collections::HashSet::new();
        for (name, field) in Tuning::SWITCHES {
            let off = Tuning::without(name).unwrap();
            assert!(seen.insert(off), "{name} is another switch's field");
            let mut again = off;
            *field(&mut again) = true;
            assert_eq!(again, Tuning::default());
        }
        let fields = format!("{:?}", Tuning::default()).matches(": ").count();
        assert_eq!(Tuning::SWITCHES.len(), fields);
        assert_eq!(Tuning::without("no such"), None);
    }
}
