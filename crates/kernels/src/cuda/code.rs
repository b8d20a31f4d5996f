//! From a kernel's text to code that a GPU runs: compiled by NVRTC, kept on disk, loaded once a process.
//!
//! NVRTC makes code for the device's own architecture, so that the driver has nothing left to translate:
//! it need not know NVRTC's version of PTX. A GPU newer than NVRTC gets PTX of the newest
//! architecture that NVRTC knows, which the driver translates.

use std::hash::{DefaultHasher, Hasher};
#[cfg(feature = "cuda")]
use std::path::Path;
use std::path::PathBuf;

/// What a program is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Code of this compute capability (90 is 9.0).
    Real(i32),
    /// PTX of this compute capability.
    Virtual(i32),
}

impl Architecture {
    /// For a device among those that a compiler knows; `None` if all of them are newer.
    pub(super) fn among(known: &[i32], device: i32) -> Option<Self> {
        if known.contains(&device) {
            return Some(Self::Real(device));
        }
        known.iter().copied().filter(|older| *older < device).max().map(Self::Virtual)
    }

    /// What the code may use: 90 is 9.0.
    #[cfg(feature = "cuda")]
    fn capability(self) -> i32 {
        match self {
            Self::Real(capability) | Self::Virtual(capability) => capability,
        }
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Real(capability) => write!(f, "sm_{capability}"),
            Self::Virtual(capability) => write!(f, "compute_{capability}"),
        }
    }
}

/// Compiled programs of earlier processes, files in a folder.
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    /// In the user's cache folder, if there is one: `XDG_CACHE_HOME`, else `HOME/.cache`.
    #[cfg(feature = "cuda")]
    pub(super) fn of_user() -> Option<Self> {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
        let home = || variable("HOME").map(|home| Path::new(&home).join(".cache"));
        let base = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home)?;
        Some(Self { folder: base.join("longdraft").join("kernels") })
    }

    /// Code that was kept under the same name for the same text.
    pub(super) fn get(&self, name: &str, text: &str) -> Option<Vec<u8>> {
        let kept = std::fs::read(self.path(name)).ok()?;
        let (own, code) = kept.split_at_checked(HEADER)?;
        (own == header(text, code)).then(|| code.to_vec())
    }

    /// Keeps code for later processes; without a place for it they compile again.
    pub(super) fn put(&self, name: &str, text: &str, code: &[u8]) {
        let bytes = [&header(text, code), code].concat();
        let own = self.folder.join(format!(".{name}.{}", std::process::id()));
        let kept = std::fs::create_dir_all(&self.folder)
            .and_then(|()| std::fs::write(&own, bytes))
            .and_then(|()| std::fs::rename(&own, self.path(name)));
        if kept.is_err() {
            let _ = std::fs::remove_file(&own);
        }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }
}

/// Bytes of a header.
const HEADER: usize = 2 * size_of::<u64>();

/// What a kept file begins with: hashes of the text and of the code, so that a file that was cut or
/// belongs to another text is not loaded.
fn header(text: &str, code: &[u8]) -> Vec<u8> {
    let hash = |bytes: &[u8]| {
        let mut hasher = DefaultHasher::new();
        hasher.write(bytes);
        hasher.finish().to_le_bytes()
    };
    [hash(text.as_bytes()), hash(code)].concat()
}

#[cfg(feature = "cuda")]
pub(super) use of_nvrtc::function;
#[cfg(all(test, feature = "cuda"))]
pub(super) use of_nvrtc::{compile, on_large_stack, version};

#[cfg(feature = "cuda")]
mod of_nvrtc {
    use std::collections::HashMap;
    use std::ffi::{CStr, CString, c_char, c_int};
    use std::panic::resume_unwind;
    use std::sync::{Arc, Mutex, PoisonError};

    use candle_core::cuda_backend::cudarc::driver::sys::CUfunction_attribute_enum as Attribute;
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaFunction, CudaModule};
    use candle_core::cuda_backend::cudarc::nvrtc::{Ptx, result, sys};
    use candle_core::{CudaDevice, Error, Result, bail};

    use super::super::Program;
    use super::super::launch::capability;
    use super::{Architecture, Cache};

    /// Compilers recurse deeper than a pool's thread has room for.
    const STACK: usize = 64 << 20;

    /// Dynamic memory that a kernel has without asking: 48 KiB, less what its static arrays take.
    const GRANTED_MEMORY: usize = 46 * 1024;

    /// The compute capability from which on a kernel's code can wait for the kernels before it.
    const OVERLAPS_FROM: i32 = 90;

    /// A program's functions on one device.
    struct Loaded {
        module: Arc<CudaModule>,
        /// With the dynamic memory that was asked for, in bytes.
        functions: HashMap<String, (CudaFunction, usize)>,
        overlaps: bool,
    }

    /// The kernel of a program on a device, whose blocks may have `memory` bytes of dynamic memory;
    /// compiled, loaded and looked up once in a process. Also whether it may begin while kernels before it run.
    pub(in super::super) fn function(
        program: &Program,
        kernel: &str,
        memory: usize,
        device: &CudaDevice,
    ) -> Result<(CudaFunction, bool)> {
        /// By the device's index and the program's name.
        static LOADED: Mutex<Option<HashMap<usize, HashMap<String, Loaded>>>> = Mutex::new(None);
        let stream = device.cuda_stream();
        let context = stream.context();
        let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let of_device = all.get_or_insert_default().entry(context.ordinal()).or_default();
        if !of_device.contains_key(&program.name) {
            let (module, architecture) = on_large_stack(|| load(program, device, context))?;
            let overlaps = program.overlaps && architecture.capability() >= OVERLAPS_FROM;
            let loaded = Loaded { module, functions: HashMap::new(), overlaps };
            of_device.insert(program.name.clone(), loaded);
        }
        let Some(loaded) = of_device.get_mut(&program.name) else { bail!("{}", program.name) };
        if !loaded.functions.contains_key(kernel) {
            let found = loaded.module.load_function(kernel).map_err(Error::wrap)?;
            loaded.functions.insert(kernel.to_owned(), (found, GRANTED_MEMORY));
        }
        let Some((function, granted)) = loaded.functions.get_mut(kernel) else { bail!("{kernel}") };
        if memory > *granted {
            let most = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            function.set_attribute(most, memory as i32).map_err(Error::wrap)?;
            *granted = memory;
        }
        Ok((function.clone(), loaded.overlaps))
    }

    /// Runs `work` where a compiler has room.
    pub(in super::super) fn on_large_stack<R: Send>(
        work: impl FnOnce() -> Result<R> + Send,
    ) -> Result<R> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(STACK);
            let thread = thread.name("compiler".to_owned()).spawn_scoped(scope, work)?;
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    fn load(
        program: &Program,
        device: &CudaDevice,
        context: &Arc<CudaContext>,
    ) -> Result<(Arc<CudaModule>, Architecture)> {
        let (major, minor) = capability(device)?;
        let known = known_architectures()?;
        let Some(architecture) = Architecture::among(&known, 10 * major + minor) else {
            bail!(
                "this NVRTC compiles for compute capabilities {known:?}, not {major}.{minor}: take an older CUDA toolkit's libraries"
            )
        };
        let name = format!("{}-{architecture}-{}", program.name, version()?);
        let cache = Cache::of_user();
        if let Some(code) = cache.as_ref().and_then(|cache| cache.get(&name, &program.text))
            && let Ok(module) = context.load_module(Ptx::from_binary(code))
        {
            return Ok((module, architecture));
        }
        let Compiled { code, .. } = compile(program, architecture, &[])?;
        let module = context.load_module(Ptx::from_binary(code.clone())).map_err(Error::wrap)?;
        if let Some(cache) = cache {
            cache.put(&name, &program.text, &code);
        }
        Ok((module, architecture))
    }

    /// A program as NVRTC has it.
    struct Handle(sys::nvrtcProgram);

    impl Drop for Handle {
        fn drop(&mut self) {
            // SAFETY: it was created and is given back once. What NVRTC says to it has no consequence.
            let _ = unsafe { result::destroy_program(self.0) };
        }
    }

    /// What NVRTC made of a program.
    pub(in super::super) struct Compiled {
        /// Code or PTX, as a module is loaded from.
        pub(in super::super) code: Vec<u8>,
        /// What it said.
        #[cfg_attr(not(test), expect(dead_code, reason = "read by the check of all kernels"))]
        pub(in super::super) log: String,
    }

    /// Compiles for an architecture.
    ///
    /// # Errors
    /// - NVRTC cannot be used, or does not take the text: with what it says
    pub(in super::super) fn compile(
        program: &Program,
        architecture: Architecture,
        options: &[&str],
    ) -> Result<Compiled> {
        let text = CString::new(&*program.text).map_err(Error::wrap)?;
        let name = CString::new(format!("{}.cu", program.name)).map_err(Error::wrap)?;
        let handle = result::create_program(&text, Some(&name)).map_err(Error::wrap)?;
        let handle = Handle(handle);
        // Such code runs on no later architecture; it is called by a letter.
        let letter = if program.for_one_architecture { "a" } else { "" };
        let target = format!("--gpu-architecture={architecture}{letter}");
        let options: Vec<&str> = options.iter().copied().chain([target.as_str()]).collect();
        // SAFETY: the program was created above and is given back after its last use.
        let compiled = unsafe { result::compile_program(handle.0, &options) };
        // SAFETY: as before.
        let log = unsafe { result::get_program_log(handle.0) }.map_err(Error::wrap)?;
        let log = until_nul(&log);
        if let Err(error) = compiled {
            bail!("NVRTC: {} for {architecture}: {error}: {}", program.name, log.trim());
        }
        let code = match architecture {
            Architecture::Virtual(_) => {
                // SAFETY: as before.
                let text = unsafe { result::get_ptx(handle.0) }.map_err(Error::wrap)?;
                text.into_iter().map(|byte| byte as u8).collect()
            }
            Architecture::Real(_) => code_of(&handle)?,
        };
        Ok(Compiled { code, log })
    }

    fn code_of(handle: &Handle) -> Result<Vec<u8>> {
        let mut size = 0_usize;
        // SAFETY: the program was compiled for a real architecture; the size is written.
        unsafe { sys::nvrtcGetCUBINSize(handle.0, &raw mut size) }.result().map_err(Error::wrap)?;
        let mut code = vec![0_u8; size];
        let bytes = code.as_mut_ptr().cast::<c_char>();
        // SAFETY: as many bytes are written as were asked for.
        unsafe { sys::nvrtcGetCUBIN(handle.0, bytes) }.result().map_err(Error::wrap)?;
        Ok(code)
    }

    fn until_nul(text: &[c_char]) -> String {
        let bytes: Vec<u8> = text.iter().map(|byte| *byte as u8).collect();
        let text = CStr::from_bytes_until_nul(&bytes);
        text.map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
    }

    /// Compute capabilities that NVRTC has compilers for.
    fn known_architectures() -> Result<Vec<i32>> {
        let mut count: c_int = 0;
        // SAFETY: the number is written.
        unsafe { sys::nvrtcGetNumSupportedArchs(&raw mut count) }.result().map_err(Error::wrap)?;
        let mut all = vec![0; count.max(0) as usize];
        // SAFETY: as many numbers are written as there are.
        unsafe { sys::nvrtcGetSupportedArchs(all.as_mut_ptr()) }.result().map_err(Error::wrap)?;
        Ok(all)
    }

    /// NVRTC's version.
    pub(in super::super) fn version() -> Result<String> {
        let (mut major, mut minor): (c_int, c_int) = (0, 0);
        // SAFETY: both numbers are written.
        unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }
            .result()
            .map_err(Error::wrap)?;
        Ok(format!("{major}.{minor}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_gets_its_own_code_and_a_newer_one_the_newest_ptx() {
        let known = [75, 80, 90, 100, 120];
        assert_eq!(Architecture::among(&known, 90), Some(Architecture::Real(90)));
        assert_eq!(Architecture::among(&known, 130), Some(Architecture::Virtual(120)));
        assert_eq!(Architecture::among(&known, 101), Some(Architecture::Virtual(100)));
        assert_eq!(Architecture::among(&known, 70), None);
        assert_eq!(Architecture::Real(90).to_string(), "sm_90");
        assert_eq!(Architecture::Virtual(120).to_string(), "compute_120");
    }

    #[test]
    fn code_is_found_again_for_the_same_text_only() -> std::io::Result<()> {
        let place = tempfile::tempdir()?;
        let cache = Cache { folder: place.path().join("kernels") };
        assert_eq!(cache.get("rows", "text"), None);
        cache.put("rows", "text", b"code");
        assert_eq!(cache.get("rows", "text").as_deref(), Some(&b"code"[..]));
        assert_eq!(cache.get("rows", "other"), None);
        assert_eq!(cache.get("linear", "text"), None);
        cache.put("rows", "other", b"newer");
        assert_eq!(
            (cache.get("rows", "text"), cache.get("rows", "other")),
            (None, Some(b"newer".to_vec()))
        );
        // Only whole files are there, and one that was cut is none.
        let files: Vec<_> = std::fs::read_dir(&cache.folder)?.collect::<Result<_, _>>()?;
        assert_eq!(files.len(), 1);
        let bytes = std::fs::read(files[0].path())?;
        for length in 0..bytes.len() {
            std::fs::write(files[0].path(), &bytes[..length])?;
            assert_eq!(cache.get("rows", "other"), None, "{length} bytes");
        }
        // Without a folder to write to nothing is kept, and nothing fails.
        let nowhere = Cache { folder: files[0].path().join("kernels") };
        nowhere.put("rows", "text", b"code");
        assert_eq!(nowhere.get("rows", "text"), None);
        Ok(())
    }
}
