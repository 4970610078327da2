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
