//! A command list as a CUDA graph: kernels of one stage side by side, each stage behind the one before it.

use std::ffi::c_void;

use cudarc::driver::result::{self, DriverError as CudaError};
use cudarc::driver::sys;

/// One kernel launch with its arguments' bytes.
pub(crate) struct Launch {
    /// The kernel.
    pub function: sys::CUfunction,
    /// Thread blocks.
    pub groups: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Device addresses of the buffers.
    pub buffers: Vec<sys::CUdeviceptr>,
    /// The argument struct.
    pub args: Vec<u8>,
    /// Bytes of shared memory beside what the kernel declares.
    pub shared: u32,
    /// The kernel waits for its inputs itself, so that it may start while the one before it runs.
    pub early: bool,
}

impl Launch {
    /// Pointers to the parameters, valid as long as `self` stays where it is.
    pub fn params(&self) -> Vec<*mut c_void> {
        let mut params: Vec<*mut c_void> =
            self.buffers.iter().map(|b| std::ptr::from_ref(b).cast_mut().cast()).collect();
        params.push(self.args.as_ptr().cast_mut().cast());
        params
    }

    /// Launches it on a stream.
    pub fn run(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        let [x, y, z] = self.groups;
        let (grid, block) = ((x, y, z), (self.threads, 1, 1));
        // SAFETY: as many parameters as the kernel has: encoders and kernels agree on them, which the emulator
        // checks for each dispatch of each test; CUDA copies them during the call. The buffers live until the driver has synchronized.
        unsafe {
            result::launch_kernel(
                self.function,
                grid,
                block,
                self.shared,
                stream,
                &mut self.params(),
            )
        }
    }
}

/// An instantiated graph.
pub(crate) struct Graph(sys::CUgraphExec);

impl Graph {
    /// Builds the graph of some stages. Behind a stage of one kernel, an early kernel alone in its stage starts when that
    /// one's thread blocks have all begun (programmatic dependent launch), any other when the stage has ended.
    pub fn new(stages: &[Vec<Launch>]) -> Result<Self, CudaError> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the graph is created here, filled with nodes of this context's kernels, and destroyed below;
        // an instantiated graph does not need it.
        unsafe {
            sys::cuGraphCreate(&mut graph, 0).result()?;
            let built = Self::fill(graph, stages)
                .and_then(|()| result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0)));
            let _ = result::graph::destroy(graph);
            Ok(Self(built?))
        }
    }

    /// Builds the graph and launches it: a driver may refuse either.
    pub fn started(stages: &[Vec<Launch>], stream: sys::CUstream) -> Result<Self, CudaError> {
        let graph = Self::new(stages)?;
        match graph.run(stream) {
            Ok(()) => Ok(graph),
            Err(e) => {
                // SAFETY: it was not launched, and its context is current.
                unsafe { graph.free() };
                Err(e)
            }
        }
    }

    /// # Safety
    /// `graph` is a graph under construction.
    unsafe fn fill(graph: sys::CUgraph, stages: &[Vec<Launch>]) -> Result<(), CudaError> {
        let mut before: Vec<sys::CUgraphNode> = Vec::new();
        for stage in stages {
            let mut nodes = Vec::new();
            let early = before.len() == 1 && stage.len() == 1 && stage[0].early;
            let whole = if early { &[] } else { &before[..] };
            for launch in stage {
                let mut params = launch.params();
                let node_params = sys::CUDA_KERNEL_NODE_PARAMS {
                    func: launch.function,
                    gridDimX: launch.groups[0],
                    gridDimY: launch.groups[1],
                    gridDimZ: launch.groups[2],
                    blockDimX: launch.threads,
                    blockDimY: 1,
                    blockDimZ: 1,
                    sharedMemBytes: launch.shared,
                    kernelParams: params.as_mut_ptr(),
                    extra: std::ptr::null_mut(),
                    kern: std::ptr::null_mut(),
                    ctx: std::ptr::null_mut(),
                };
                let mut node = std::ptr::null_mut();
                // SAFETY: the parameters are copied during the call.
                unsafe {
                    sys::cuGraphAddKernelNode_v2(
                        &mut node,
                        graph,
                        whole.as_ptr(),
                        whole.len(),
                        &node_params,
                    )
                    .result()?;
                }
                nodes.push(node);
            }
            if early {
                let edge = sys::CUgraphEdgeData {
                    from_port: sys::CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC as u8,
                    to_port: 0,
                    type_: sys::CUgraphDependencyType::CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC as u8,
                    reserved: [0; 5],
                };
                // SAFETY: one node on either side, both of this graph.
                unsafe {
                    sys::cuGraphAddDependencies_v2(graph, &before[0], &nodes[0], &edge, 1)
                        .result()?;
                }
            }
            before = nodes;
        }
        Ok(())
    }

    /// Launches it on a stream.
    pub fn run(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: instantiated in `new`, not yet destroyed.
        unsafe { result::graph::launch(self.0, stream) }
    }

    /// Gives it back.
    ///
    /// # Safety
    /// It does not run any more, and its context is current.
    pub unsafe fn free(self) {
        // SAFETY: consumed, so destroyed once.
        unsafe {
            let _ = result::graph::exec_destroy(self.0);
        }
    }
}

/// Whether a graph saves more than making it takes (some milliseconds): kernels wait for the host, or for each other's starts, where
/// they are short. Those of long prompts are not; a step of 8 slots has 9 µs a kernel, 512 tokens of a prompt 18, 1,024 take 27. A host
/// that launches slowly makes all kernels seem long: there `launching`, its own part of these `seconds`, decides.
pub(crate) fn pays(seconds: f64, launching: f64, kernels: usize) -> bool {
    seconds <= 20e-6 * kernels as f64 || launching > 0.5 * seconds
}

/// A graph that was built, and what had to be given up for it.
pub(crate) struct Built<G> {
    /// The graph; without one the kernels run one by one.
    pub graph: Option<G>,
    /// Why none with early starts could be built.
    refusal: Option<CudaError>,
}

/// Makes the graph of some stages: with early starts, else without. A refusal is this list's alone: the next one may have room
/// for its graph, or no early kernel at all.
pub(crate) fn build<G>(
    stages: &mut [Vec<Launch>],
    mut make: impl FnMut(&[Vec<Launch>]) -> Result<G, CudaError>,
) -> Built<G> {
    let refusal = match make(stages) {
        Ok(graph) => return Built { graph: Some(graph), refusal: None },
        Err(e) => e,
    };
    let mut early = false;
    for launch in stages.iter_mut().flatten() {
        early |= std::mem::replace(&mut launch.early, false);
    }
    let graph = if early { make(stages).ok() } else { None };
    Built { graph, refusal: Some(refusal) }
}

impl<G> Built<G> {
    /// What there is to say of a list of so many kernels.
    pub fn note(&self, kernels: usize) -> Option<String> {
        let why = self.refusal.as_ref()?;
        let instead = match self.graph {
            Some(_) => "its kernels wait for each other",
            None => "its kernels are launched one by one",
        };
        Some(format!(
            "CUDA made no graph of a step of {kernels} kernels ({:?}): {instead}, which is slower",
            why.0
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(early: bool) -> Vec<Vec<Launch>> {
        let launch = |early| Launch {
            function: std::ptr::null_mut(),
            groups: [1; 3],
            threads: 32,
            buffers: Vec::new(),
            args: Vec::new(),
            shared: 0,
            early,
        };
        vec![vec![launch(false)], vec![launch(early)]]
    }

    const REFUSED: CudaError = CudaError(sys::CUresult::CUDA_ERROR_NOT_SUPPORTED);

    /// What is built, how often it was tried, and whether something is said, if graphs with early starts and those without
    /// can be made.
    fn built(early: bool, with: bool, without: bool) -> (Option<bool>, usize, bool) {
        let mut tries = 0;
        let built = build(&mut stages(early), |stages: &[Vec<Launch>]| {
            tries += 1;
            let early = stages.iter().flatten().any(|l| l.early);
            if if early { with } else { without } { Ok(early) } else { Err(REFUSED) }
        });
        let said = built.note(2).is_some();
        (built.graph, tries, said)
    }

    #[test]
    fn a_graph_is_built_without_early_starts_where_it_must_be() {
        assert_eq!(built(true, true, true), (Some(true), 1, false));
        assert_eq!(built(true, false, true), (Some(false), 2, true));
        assert_eq!(built(true, false, false), (None, 2, true));
        // Without an early kernel a second try would be the same.
        assert_eq!(built(false, true, true), (Some(false), 1, false));
        assert_eq!(built(false, true, false), (None, 1, true));
        // One list's refusal is no other's.
        assert_eq!(built(true, true, true), (Some(true), 1, false));
    }

    #[test]
    fn a_graph_pays_where_kernels_are_short() {
        // A host that needs 30 µs a launch.
        assert!(pays(13e-3, 12.6e-3, 420));
        // Before it was waited for once nothing is known; a decode step of the real shape of 1 and of 8 slots, prompts of 512 and 4,096 tokens.
        for (seconds, kernels, pay) in [
            (0.0, 420, true),
            (1.5e-3, 420, true),
            (3.8e-3, 420, true),
            (20e-3, 1150, true),
            (80e-3, 1150, false),
        ] {
            assert_eq!(
                pays(seconds, 3e-6 * kernels as f64, kernels),
                pay,
                "{kernels} kernels, {seconds} s"
            );
        }
    }
}
